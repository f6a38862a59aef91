"""Finds the program in a completion."""

import re

_BLOCK = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)[^\n]*\n(?P<inside>.*?)^[ \t]*(?P=fence)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = frozenset({"python", "python3", "py"})


def last_python_block(text: str) -> str | None:
    """Give what stands in the last complete block that is fenced and marked as Python; None without one."""
    blocks = [match["inside"] for match in _BLOCK.finditer(text) if match["language"].lower() in _PYTHON]
    return blocks[-1] if blocks else None
