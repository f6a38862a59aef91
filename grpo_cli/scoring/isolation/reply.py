"""What a reward function returned, as plain values that go through JSON: nothing is unpickled that a worker process has sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from grpo_cli.metrics import Mean
from grpo_cli.scoring.isolation.failures import ReportedError

_SHOWN = "shown"
_MOST_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Shown:
    """A value that no reward can be: only how it looks has come over."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a call in another process came to.

    Attributes:
        returned: Numbers and None, `Shown` for what a reward cannot be.
        columns: What the function logged with `log_extra`.
        metrics: What it logged with `log_metric`.
        state: What an object that has one has come to.
    """

    returned: Any
    columns: Mapping[str, Sequence[Any]]
    metrics: Mapping[str, Mean]
    state: Any


def shown(value: Any) -> str:
    """Show a value of a reward function to a person, with its type."""
    if isinstance(value, Shown):
        return value.text
    text = repr(value)
    text = text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
    return text if isinstance(value, float) else f"{text} ({type(value).__name__})"


def plain_rewards(returned: Any) -> Any:
    """Write what a reward function returned as JSON can hold it.

    Args:
        returned: A list, tuple, tensor or array of numbers and None; or anything else, of which its looks are left.
    """
    values = returned.tolist() if hasattr(returned, "__array__") and hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        return {_SHOWN: shown(returned)}
    return [_plain_reward(value) for value in values]


def answer_of(told: Mapping[str, Any]) -> Answer:
    """Read what a process has told of a call.

    Raises:
        ReportedError: If the function raised.
    """
    if "raised" in told:
        error = ReportedError(told["raised"])
        error.add_note(told["traceback"])
        raise error
    if "refused" in told:
        raise ReportedError(told["refused"][0])
    return Answer(
        returned=_rewards_of(told["returned"]),
        columns=told["columns"],
        metrics={name: Mean(total, count) for name, (total, count) in told["metrics"].items()},
        state=told.get("state"),
    )


def _rewards_of(plain: Any) -> Any:
    """Undo `plain_rewards`."""
    if isinstance(plain, Sequence):
        return [_rewards_of(value) if isinstance(value, dict) else value for value in plain]
    return Shown(str(plain[_SHOWN]))


def plain_extra(value: Any) -> Any:
    """Write a value of `log_extra` as completion files would: a number, a truth value, a text or null."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def _plain_reward(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:  # a number out of a tensor or an array
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Real):
        return float(value)
    return {_SHOWN: shown(value)}
