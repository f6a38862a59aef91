"""Values as JSON, so that they can be taken from a process that is not trusted.

Numbers, texts and the built-in containers travel as they are, with their types; those of subclasses as the built-in one. A value
that is none of these stays where it is, and a reference travels: `["mine", number]` from the one who has it, `["yours", number]`
back, `["class", ...]` for the class of an exception (`exceptions`). Reading builds values of known types and nothing else.
"""

import base64
import sys
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

Refer = Callable[[Any], list[Any]]
"""Makes the reference to a value."""
Resolve = Callable[[str, Any], Any]
"""Finds or stands in for the value of a reference."""

_SAFE_INTEGER = 1 << 63
_MAX_EXPONENT = 100_000
_SEQUENCES: dict[str, type[Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_EMPTY: dict[Any, Any] = {}
_WRITTEN: list[tuple[str, type[Any]]] = [
    *_SEQUENCES.items(),
    *(("list", type(view)) for view in (_EMPTY.keys(), _EMPTY.values(), _EMPTY.items())),
]
_NUMBERS_AND_TEXTS = "biufcU"
"""Kinds of arrays that hold no objects."""


def write(value: Any, refer: Refer) -> Any:
    """Turn a value into what JSON can hold."""
    if value is None or isinstance(value, bool):
        return value
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind):
            return plain(value)
    for name, kind in _WRITTEN:
        if isinstance(value, kind):
            return [name, [write(each, refer) for each in kind.__iter__(value)]]
    if isinstance(value, dict):
        return ["dict", [[write(key, refer), write(each, refer)] for key, each in dict.items(value)]]
    numpy = sys.modules.get("numpy")
    if (
        numpy is not None
        and isinstance(value, numpy.generic | numpy.ndarray)
        and value.dtype.kind in _NUMBERS_AND_TEXTS
    ):
        return ["array", [value.dtype.str, write(value.tolist(), refer)]]
    return refer(value)


def _integer(value: int) -> Any:
    """Write large ones by their digits in base 16: those in base 10 take long."""
    number = int.__int__(value)
    return number if abs(number) < _SAFE_INTEGER else ["int", hex(number)]


_PLAIN: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: _integer,
    float: float.__float__,
    range: lambda value: ["range", [hex(value.start), hex(value.stop), hex(value.step)]],
    bytes: lambda value: ["bytes", base64.b64encode(value).decode("ascii")],
    bytearray: lambda value: ["bytearray", base64.b64encode(value).decode("ascii")],
    complex: lambda value: ["complex", [value.real, value.imag]],
    Fraction: lambda value: ["fraction", [hex(value.numerator), hex(value.denominator)]],
    Decimal: lambda value: ["decimal", str(value)],
}


def read(content: Any, resolve: Resolve) -> Any:
    """Build the value that was written.

    Raises:
        ValueError: If nothing writes such content.
    """
    if content is None or isinstance(content, bool | int | float | str):
        return content
    try:
        kind, inside = content
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](read(each, resolve) for each in inside)
        if kind in ("mine", "yours", "class"):
            return resolve(kind, inside)
        if kind == "dict":
            return {read(key, resolve): read(each, resolve) for key, each in inside}
        if kind == "array":
            return _array(inside[0], read(inside[1], resolve))
        return _READ[kind](inside)
    except (TypeError, LookupError, ArithmeticError, AttributeError, ImportError) as error:
        raise ValueError(f"not a value: {error}") from error


def _array(kind: Any, elements: Any) -> Any:
    import numpy as np  # noqa: PLC0415  only where the other side has it

    if not isinstance(kind, str) or np.dtype(kind).kind not in _NUMBERS_AND_TEXTS:
        raise ValueError(f"not a type of numbers: {kind!r}")
    return np.array(elements, dtype=kind)[()]


def _decimal(text: Any) -> Decimal:
    """Read a number, but none whose digits would take seconds to write down."""
    number = Decimal(text)
    if number.is_finite() and abs(number.adjusted()) > _MAX_EXPONENT:
        raise ValueError("a decimal number that is too large or too small")
    return number


_READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda inside: int(inside, 16),
    "range": lambda inside: range(*(int(each, 16) for each in inside)),
    "bytes": base64.b64decode,
    "bytearray": lambda inside: bytearray(base64.b64decode(inside)),
    "complex": lambda inside: complex(float(inside[0]), float(inside[1])),
    "fraction": lambda inside: Fraction(int(inside[0], 16), int(inside[1], 16)),
    "decimal": _decimal,
}
