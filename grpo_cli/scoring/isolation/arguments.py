"""Arguments of a call as JSON: plain values, and the few other kinds that a dataset's rows can hold."""

import base64
import datetime as dt
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from grpo_cli.scoring.trainer_state import RecentRewards, TrainerState

_BYTES, _IMAGE, _TIME, _DATE, _STATE = (f"grpo:{kind}" for kind in ("bytes", "image", "time", "date", "trainer_state"))


def written(arguments: Mapping[str, Any]) -> bytes:
    """Write arguments.

    Raises:
        TypeError: If one holds what cannot be sent to another process.
    """
    try:
        return json.dumps(arguments, default=_marked).encode()
    except TypeError as error:
        raise TypeError(
            f"{error}; an isolated function can be given numbers, texts, lists, mappings, bytes, dates, arrays and images"
        ) from error


def read(message: bytes) -> Any:
    """Undo `written`; arrays come back as lists."""
    return json.loads(message, object_hook=_unmarked)


def _marked(value: Any) -> Any:
    """Write a value that JSON does not have."""
    if isinstance(value, bytes | bytearray):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, dt.datetime):
        return {_TIME: value.isoformat()}
    if isinstance(value, dt.date):
        return {_DATE: value.isoformat()}
    if isinstance(value, TrainerState):
        return {_STATE: asdict(value)}
    if hasattr(value, "__array__") and hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "save") and type(value).__module__.startswith("PIL."):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return {_IMAGE: base64.b64encode(buffer.getvalue()).decode()}
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


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


_READERS: Mapping[str, Callable[[Any], Any]] = {
    _BYTES: base64.b64decode,
    _TIME: dt.datetime.fromisoformat,
    _DATE: dt.date.fromisoformat,
    _STATE: _trainer_state,
    _IMAGE: _image,
}
