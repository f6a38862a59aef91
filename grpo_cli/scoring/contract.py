"""What a reward function receives, and what it may return.

A reward function is called with keyword arguments, one entry per completion in every list:

    prompts                             strings, or lists of messages for conversational prompts
    completions                         strings, or `[{"role": "assistant", "content": text}]`
    completion_ids (completions_ids)    lists of token ids
    trainer_state                       where the run is, a `TrainerState`
    log_extra(column, values)           adds a column, one value per completion, to the completion files
    log_metric(name, value)             averages a number into the metrics, once for each completion of the call, under a name that `check_metric_names` allows
    image, images                       PIL images, upright, most of them not yet read, or lists of them: a column's, or those in the prompt's messages
    <column>                            every other column of the dataset

It declares the ones it wants, or takes `**kwargs` to get all; but an isolated function gets images only under parameters of these
names, for they go to its process anew for every completion. It returns one number per completion, or None where it does not
apply. The columns `prompt` and `completion` are not passed under their own names, and a column cannot take the name of one of
the arguments above: see `RESERVED_COLUMNS`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from grpo_cli.errors import RewardError
from grpo_cli.recipe.schema.rewards import RESERVED_COLUMNS
from grpo_cli.scoring.isolation.reply import shown
from grpo_cli.scoring.journal import Journal
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.types import IMAGE, IMAGES, Group, Prompt
from grpo_cli.vision.pictures import opened_upright

_OWN_PREFIXES = ("eval/", "time/")
"""What the names of evaluations' metrics and of wall times begin with."""

_FLOAT32_MAX = torch.finfo(torch.float32).max
_ALLOWED = "allowed is a finite number, or None where it does not apply"


def call_arguments(groups: Sequence[Group], trainer_state: TrainerState, journal: Journal) -> dict[str, Any]:
    """Build every keyword argument that a reward function may receive for all completions of some groups.

    The lists are made anew for each call, so that one function cannot change what the next one sees.
    """
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    rows = [row for group in groups for row in [_opened(group.prompt)] * len(group.completions)]
    arguments: dict[str, Any] = {name: [row.get(name) for row in rows] for name in dataset_columns(groups)}
    ids = [list(completion.ids) for _, completion in pairs]
    arguments |= {
        "prompts": [
            prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
            for prompt, _ in pairs
        ],
        "completions": [
            completion.text if prompt.messages is None else [{"role": "assistant", "content": completion.text}]
            for prompt, completion in pairs
        ],
        "completion_ids": ids,
        "completions_ids": ids,
        "trainer_state": trainer_state,
        "log_extra": journal.log_extra,
        "log_metric": journal.log_metric,
    }
    return arguments


def _opened(prompt: Prompt) -> Mapping[str, Any]:
    """Give a prompt's row with its images as PIL has them, upright; where none is to be turned no pixels are read before they are asked for."""
    if not prompt.images:
        return prompt.row
    images = [opened_upright(image) for image in prompt.images]
    return {**prompt.row, **({IMAGE: images[0]} if prompt.row.get(IMAGE) is not None else {IMAGES: images})}


def dataset_columns(groups: Sequence[Group]) -> tuple[str, ...]:
    """Name the columns that reward functions get, in order of first appearance; a row without one counts with None."""
    return tuple(dict.fromkeys(name for group in groups for name in group.prompt.row if name not in RESERVED_COLUMNS))


def checked_rewards(name: str, returned: Any, groups: Sequence[Group]) -> list[Tensor | RewardError]:
    """Turn what a reward function returned into one tensor per group, or the error of a group with a value that is not allowed.

    Args:
        name: The reward function's.
        returned: A list, tuple, tensor or array with one element per completion.
        groups: What it was called with.

    Returns:
        Per group float32 [G], CPU, NaN for None; or a RewardError that names the row and the value.

    Raises:
        RewardError: If the container has the wrong type or length.
    """
    values = _values(name, returned, groups)
    outcome: list[Tensor | RewardError] = []
    start = 0
    for group in groups:
        end = start + len(group.completions)
        outcome.append(_group_rewards(name, values[start:end], group))
        start = end
    return outcome


def check_metric_names(name: str, logged: Iterable[Any]) -> None:
    """Check that a reward function logged no metric under a name by which records of the run are told apart.

    Args:
        name: The reward function's.
        logged: The names given to `log_metric`.

    Raises:
        RewardError: Naming the function and the first such name.
    """
    for metric in logged:
        if not isinstance(metric, str) or metric == "step" or metric.startswith(_OWN_PREFIXES):
            raise RewardError(
                f"reward function {name!r} logged a metric named {metric!r}; allowed is any text but 'step' and what begins "
                f"with {' or '.join(map(repr, _OWN_PREFIXES))}",
                hint="give `log_metric` another name",
            )


def _values(name: str, returned: Any, groups: Sequence[Group]) -> Sequence[Any]:
    count = sum(len(group.completions) for group in groups)
    values = returned.tolist() if isinstance(returned, Tensor) or hasattr(returned, "__array__") else returned
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"reward function {name!r} returned {shown(returned)} for {_range(groups)}; "
            f"allowed is a list with one number or None per completion"
        )
    if len(values) != count:
        raise RewardError(
            f"reward function {name!r} returned {len(values)} values for the {count} completions of {_range(groups)}: "
            f"{shown(returned)}",
            hint="return one value per completion, in the order of `completions`; None where the reward does not apply",
        )
    return values


def _group_rewards(name: str, values: Sequence[Any], group: Group) -> Tensor | RewardError:
    numbers = []
    for value, completion in zip(values, group.completions, strict=True):
        number = _number(value)
        if number is None:
            return RewardError(
                f"reward function {name!r} returned {shown(value)} for prompt {group.prompt.uid}, "
                f"completion {completion.index}; {_ALLOWED}",
            )
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float32)


def _number(value: Any) -> float | None:
    """Read one returned value: a float, NaN for None, or None for what is not allowed."""
    if value is None:
        return math.nan
    if getattr(value, "ndim", None) == 0:  # a number out of a tensor or an array
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        return None
    # Larger magnitudes would become infinite in the rewards' float32.
    return number if abs(number) <= _FLOAT32_MAX else None


def _range(groups: Sequence[Group]) -> str:
    first, last = groups[0].prompt.uid, groups[-1].prompt.uid
    return f"prompt {first}" if len(groups) == 1 else f"prompts {first} to {last}"
