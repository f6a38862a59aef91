"""Arguments of a call as JSON: plain values, and the few other kinds that a dataset's rows can hold."""

import base64
import datetime as dt
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import Any

from grpo_cli.scoring.trainer_state import RecentRewards, TrainerState

_BYTES, _IMAGE, _STATE = "grpo:bytes", "grpo:image", "grpo:trainer_state"
_DATETIME, _DATE, _TIME, _DURATION, _DECIMAL = (
    f"grpo:{kind}" for kind in ("datetime", "date", "time", "duration", "decimal")
)
_MODES_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")


def written(arguments: Mapping[str, Any]) -> bytes:
    """Write arguments.

    Raises:
        TypeError: If one holds what cannot be sent to another process.
    """
    try:
        return json.dumps(arguments, default=_marked).encode()
    except TypeError as error:
        raise TypeError(
            f"{error}; an isolated function can be given numbers, texts, lists, mappings, bytes, times, arrays and images"
        ) from error


def read(message: bytes) -> Any:
    """Undo `written`; arrays come back as lists."""
    return json.loads(message, object_hook=_unmarked)


def _marked(value: Any) -> Any:
    """Write a value that JSON does not have."""
    if hasattr(value, "__array__") and hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "save") and type(value).__module__.startswith("PIL."):
        return {_IMAGE: base64.b64encode(_png(value)).decode()}
    for kind, mark, write in _WRITERS:
        if isinstance(value, kind):
            return {mark: write(value)}
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    (image if image.mode in _MODES_OF_PNG else image.convert("RGB")).save(buffer, format="PNG")
    return buffer.getvalue()


def _unmarked(value: dict[str, Any]) -> Any:
    """Undo `_marked`, and leave other mappings alone."""
    mark = next(iter(value)) if len(value) == 1 else ""
    return _READERS[mark](value[mark]) if mark in _READERS else value


def _trainer_state(content: dict[str, Any]) -> TrainerState:
    recent = {name: RecentRewards(**one) for name, one in content["recent_rewards"].items()}
    return TrainerState(**{**content, "recent_rewards": recent})


def _image(content: str) -> Any:
    from PIL import Image  # noqa: PLC0415  only a worker that is given images needs it

    return Image.open(io.BytesIO(base64.b64decode(content)))


_WRITERS: Sequence[tuple[type[Any], str, Callable[[Any], Any]]] = (
    (bytes, _BYTES, lambda value: base64.b64encode(value).decode()),
    (dt.datetime, _DATETIME, dt.datetime.isoformat),
    (dt.date, _DATE, dt.date.isoformat),
    (dt.time, _TIME, dt.time.isoformat),
    (dt.timedelta, _DURATION, lambda value: value / dt.timedelta(microseconds=1)),
    (Decimal, _DECIMAL, str),
    (TrainerState, _STATE, asdict),
)
_READERS: Mapping[str, Callable[[Any], Any]] = {
    _BYTES: base64.b64decode,
    _DATETIME: dt.datetime.fromisoformat,
    _DATE: dt.date.fromisoformat,
    _TIME: dt.time.fromisoformat,
    _DURATION: lambda microseconds: dt.timedelta(microseconds=microseconds),
    _DECIMAL: Decimal,
    _STATE: _trainer_state,
    _IMAGE: _image,
}
