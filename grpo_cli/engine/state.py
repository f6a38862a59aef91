"""Everything that the next step depends on, in memory and in a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_cli.engine.checkpoint_store import BestCheckpoint
from grpo_cli.engine.randomness import RandomState
from grpo_cli.engine.window import RolloutWindow, window_from_state, window_state
from grpo_cli.errors import CheckpointError

RECIPE_FILE = "recipe.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run is. Weights, optimizer and reference are kept by their owners.

    Attributes:
        step: Optimizer steps done.
        evaluated: Whether the evaluation that is due at this step has been done.
        window: The rollout window that the next step trains on, of which this process has its share; None: the next step generates.
        whole_window: All of it, in the main process, which writes it.
        position: Optimizer steps done in that window.
        num_tokens: Prompt and completion tokens generated so far.
        prompts_drawn: Prompts taken from the sampler so far.
        best: The best evaluation so far.
        stages: JSON state of the stages that have one (prompts, scorer, health, recorder, token_budget), by name.
        random: The global generators.
    """

    step: int = 0
    evaluated: bool = False
    window: RolloutWindow | None = None
    whole_window: RolloutWindow | None = None
    position: int = 0
    num_tokens: int = 0
    prompts_drawn: int = 0
    best: BestCheckpoint | None = None
    stages: Mapping[str, Any] = field(default_factory=dict)
    random: RandomState


def write_state(state: RunState, folder: Path) -> None:
    """Write a run state as `state.json` and `state.safetensors`."""
    tensors = {f"random/{name}": value for name, value in state.random.torch.items()}
    description: dict[str, Any] = {
        "step": state.step,
        "evaluated": state.evaluated,
        "position": state.position,
        "num_tokens": state.num_tokens,
        "prompts_drawn": state.prompts_drawn,
        "best": None
        if state.best is None
        else {"step": state.best.step, "metric": state.best.metric, "value": state.best.value},
        "stages": dict(state.stages),
        "random": {"python": state.random.python, "numpy": state.random.numpy},
        "window": None,
    }
    if state.whole_window is not None:
        description["window"], window_tensors = window_state(state.whole_window)
        tensors |= {f"window/{name}": value for name, value in window_tensors.items()}
    (folder / "state.json").write_text(json.dumps(description), encoding="utf-8")
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "state.safetensors")


def read_recipe(folder: Path) -> dict[str, Any]:
    """Read the recipe that a checkpoint's run had.

    Raises:
        CheckpointError: If it is not there.
    """
    try:
        recipe: dict[str, Any] = json.loads((folder / RECIPE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no checkpoint of this version: {error}") from error
    return recipe


def read_state(folder: Path) -> RunState:
    """Read what `write_state` wrote. The window is a whole one.

    Raises:
        CheckpointError: If the files are not those of a run state.
    """
    try:
        description = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "state.safetensors")
        window = None
        if description["window"] is not None:
            window = window_from_state(description["window"], _below(tensors, "window/"))
        return RunState(
            step=description["step"],
            evaluated=description["evaluated"],
            window=window,
            whole_window=window,
            position=description["position"],
            num_tokens=description["num_tokens"],
            prompts_drawn=description["prompts_drawn"],
            best=None if description["best"] is None else BestCheckpoint(**description["best"]),
            stages=description["stages"],
            random=RandomState(**description["random"], torch=_below(tensors, "random/")),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} is no checkpoint of this version: {type(error).__name__}: {error}",
            hint="name a folder such as output_dir/checkpoints/step-000100",
        ) from error


OptimizerStates = Mapping[int, Mapping[str, Tensor]]
"""An optimizer's states, by the number of the parameter that they belong to."""


def write_optimizer(states: OptimizerStates, file: Path) -> None:
    """Write states of an optimizer, or a part of them; its hyperparameters are the recipe's."""
    tensors = {
        f"{number}/{name}": value.contiguous() for number, values in states.items() for name, value in values.items()
    }
    save_file(tensors, file)


def read_optimizer(folder: Path, shapes: Sequence[torch.Size]) -> dict[int, dict[str, Tensor]]:
    """Read what `write_optimizer` wrote into one file of a folder, or a part into each of several.

    Args:
        folder: A checkpoint.
        shapes: Of the trained parameters, in the optimizer's order.

    Raises:
        CheckpointError: If the states are those of other parameters.
    """
    states: dict[int, dict[str, Tensor]] = {}
    for file in sorted(folder.glob("optimizer*.safetensors")):
        for key, value in load_file(file).items():
            number, name = key.split("/")
            states.setdefault(int(number), {})[name] = value
    fits = all(
        number < len(shapes) and value.shape in {torch.Size(), shapes[number]}
        for number, values in states.items()
        for value in values.values()
    )
    if not fits:
        raise CheckpointError(f"{folder}: the optimizer state does not fit this recipe's model")
    return states


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Select the tensors under a prefix."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
