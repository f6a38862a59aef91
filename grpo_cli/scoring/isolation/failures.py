"""How a call in another process can fail."""


class LostCallError(Exception):
    """A call that got no answer: its process hung, ended, or had to be ended. The text goes on after the function's name."""


class ReportedError(Exception):
    """An exception that a function raised in its process: its type and text, and where as a note."""
