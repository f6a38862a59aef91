"""Finds the program in a completion."""

import re
from bisect import bisect_right

_OPENING = re.compile(r"[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)")
_CLOSING = re.compile(r"[ \t]*(?P<fence>`{3,}|~{3,})[ \t\r]*")
_PYTHON = frozenset({"python", "python3", "py"})


def last_python_block(text: str) -> str | None:
    """Give what stands in the last complete block that is fenced and marked as Python; None without one.

    The time grows with the length of the text, whatever stands in it: a block that is never closed is no block, and a regular
    expression over the whole text would look for its end again from each line.
    """
    lines = text.split("\n")
    closings: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        if match := _CLOSING.fullmatch(line):
            closings.setdefault(match["fence"], []).append(index)
    found, index = None, 0
    while index < len(lines):
        match = _OPENING.match(lines[index])
        ends = closings.get(match["fence"], []) if match else []
        position = bisect_right(ends, index)
        if match and position < len(ends):
            if match["language"].lower() in _PYTHON:
                found = "".join(f"{line}\n" for line in lines[index + 1 : ends[position]])
            index = ends[position]
        index += 1
    return found
