"""Values as JSON, so that they can be taken from a process that is not trusted.

Numbers, texts and the built-in containers travel as they are, with their types; those of subclasses as the built-in one. A value
that is none of these stays where it is, and a reference travels: `["mine", number]` from the one who has it, `["yours", number]`
back. Reading builds values of known types and nothing else.
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
Resolve = Callable[[str, int], Any]
"""Finds or stands in for the value of a reference."""

_SAFE_INTEGER = 1 << 63
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    **{"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque},
}


def write(value: Any, refer: Refer) -> Any:
    """Turn a value into what JSON can hold."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if abs(number) < _SAFE_INTEGER else ["int", hex(number)]
    if isinstance(value, float):
        return float.__float__(value)
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):  # type: ignore[arg-type]  # they are types
            return [name, [write(each, refer) for each in kind.__iter__(value)]]  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return ["dict", [[write(key, refer), write(each, refer)] for key, each in dict.items(value)]]
    return _write_rarer(value, refer)


def _write_rarer(value: Any, refer: Refer) -> Any:
    match value:
        case bytes() | bytearray():
            return ["bytes", base64.b64encode(value).decode("ascii")]
        case complex():
            return ["complex", [value.real, value.imag]]
        case Fraction():
            return ["fraction", [hex(value.numerator), hex(value.denominator)]]
        case Decimal():
            return ["decimal", str(value)]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray) and value.dtype.kind in "biufcU":
        return ["array", [value.dtype.str, write(value.tolist(), refer)]]
    return refer(value)


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
        return _read_rarer(kind, inside, resolve)
    except (TypeError, ArithmeticError, AttributeError, ImportError) as error:
        raise ValueError(f"not a value: {error}") from error


def _read_rarer(kind: str, inside: Any, resolve: Resolve) -> Any:
    match kind:
        case "dict":
            return {read(key, resolve): read(each, resolve) for key, each in inside}
        case "mine" | "yours":
            return resolve(kind, int(inside))
        case "int":
            return int(inside, 16)
        case "bytes":
            return base64.b64decode(inside)
        case "complex":
            return complex(float(inside[0]), float(inside[1]))
        case "fraction":
            return Fraction(int(inside[0], 16), int(inside[1], 16))
        case "decimal":
            return Decimal(inside)
        case "array":
            import numpy as np  # noqa: PLC0415  only where the other side has it

            if not isinstance(inside[0], str) or np.dtype(inside[0]).kind not in "biufcU":
                raise ValueError(f"not a type of numbers: {inside[0]!r}")
            return np.array(read(inside[1], resolve), dtype=inside[0])[()]
    raise ValueError(f"not a kind of value: {kind!r}")
