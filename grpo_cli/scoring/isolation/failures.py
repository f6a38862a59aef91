"""How a call in another process can fail, and what a person reads of it."""

_MOST_CHARACTERS = 400


class LostCallError(Exception):
    """A call that got no answer: its process hung, ended, or had to be ended. The text goes on after the function's name."""


class TimedOutError(LostCallError):
    """A call that took longer than it may."""


class ReportedError(Exception):
    """An exception that a function raised in its process: its type and text, and where as a note."""


def readable(text: str, *, keep: str = "") -> str:
    """Replace characters that steer a terminal by spaces.

    Args:
        text: Of a user's program.
        keep: Characters that stay all the same.
    """
    return "".join(each if each.isprintable() or each in keep else " " for each in text)


def one_line(text: str) -> str:
    """Make a line of a text of any length that a person can read."""
    line = " ".join(readable(text[: 4 * _MOST_CHARACTERS]).split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."
