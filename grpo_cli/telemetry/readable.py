"""Values as text for a person: four significant digits, readable durations and sizes, foreign text without side effects."""

import math
import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories that move the cursor, reorder text or cannot be written: control, format, surrogate, separators."""


def short(value: float) -> str:
    """Write a number with four significant digits; NaN, which stands for nothing to measure, as a dash."""
    if math.isnan(value):
        return "-"
    if 1e4 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    """Write a share as a percentage."""
    return "-" if math.isnan(value) else f"{100 * value:.0f}%"


def duration(seconds: float) -> str:
    """Write a time: `4.2s`, `1m 52s`, `3h 07m`, `2d 04h`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def size(count: float) -> str:
    """Write a number of bytes: `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def magnitude(count: int) -> str:
    """Write a number of parameters: `134.5M`, `7.2B`."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f}{unit}"
    return str(count)


def visible(text: str) -> str:
    r"""Write control characters, line ends included, as escapes such as `\n`: foreign text cannot steer the terminal."""
    return "".join(
        character.encode("unicode_escape").decode() if unicodedata.category(character) in _HIDDEN else character
        for character in text
    )


def head_and_tail(text: str, limit: int) -> str:
    """Shorten a text in the middle."""
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def tail(text: str, limit: int) -> str:
    """Shorten a text at its beginning."""
    return text if len(text) <= limit else f"…{text[-(limit - 1) :]}"
