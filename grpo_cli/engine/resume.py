"""What `--resume` means for a run: which checkpoint, what of the recipe has changed since, and how much is behind it."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.engine.checkpoint_store import CheckpointStore
from grpo_cli.engine.continued import with_adapter_settings
from grpo_cli.engine.export import MODEL_FOLDER
from grpo_cli.engine.run_directory import checkpoint_to_resume
from grpo_cli.engine.run_length import Done
from grpo_cli.engine.state import RunState, read_recipe, read_state
from grpo_cli.errors import CheckpointError, ModelError
from grpo_cli.policy.weights_below import other_base
from grpo_cli.recipe.compare import changed_keys
from grpo_cli.recipe.kinds import show
from grpo_cli.recipe.load import LoadedRecipe

_FIXED = (
    *(
        "model.name_or_path",
        "model.random_weights_seed",
        "model.revision",
        "model.tokenizer_name_or_path",
        "model.dtype",
    ),
    *("model.quantization", "model.bnb_4bit_", "model.lora", "model.freeze", "train.learning_rates"),
)
"""The weights come from the checkpoint, so another value here could only seem to be obeyed; so does the optimizer, whose states are in
the order that trained parts and those with learning rates of their own have given them."""

_FREE = (
    "run_name",
    "logging.",
    "train.output_dir",
    "train.overwrite_output_dir",
    "train.save_steps",
    "train.keep_checkpoints",
)
"""What a run does not depend on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Where a run begins.

    Attributes:
        loaded: The recipe, with what the adapters say that it goes on from.
        continues: Whether it goes on in its own run directory; False: it begins there with an empty one.
        checkpoint: The checkpoint it starts from; None: from the beginning.
        state: The run state of that checkpoint.
        done: What is behind it.
    """

    loaded: LoadedRecipe
    continues: bool
    checkpoint: Path | None
    state: RunState | None
    done: Done


def find_resumed(loaded: LoadedRecipe, output_dir: Path, resume: str | None, say: Callable[[str], None]) -> Resumed:
    """Find the checkpoint to resume from, read its state, and compare its recipe with the present one.

    Args:
        loaded: The present recipe.
        output_dir: Its run directory.
        resume: What `--resume` said; None: it was not given.
        say: Told about checkpoints that are passed over and about changes of the recipe.

    Raises:
        CheckpointError: If there is nothing to resume from where one was named, all checkpoints are damaged, or the recipe
            changed in a way that cannot be followed, or the weights below adapters did.
        ModelError: If adapters that it goes on from are not found, or the recipe contradicts them.
    """
    if resume is None:
        loaded = with_adapter_settings(loaded)
        return Resumed(loaded=loaded, continues=False, checkpoint=None, state=None, done=Done())
    store = CheckpointStore(output_dir / "checkpoints", keep=loaded.recipe.train.keep_checkpoints)
    checkpoint = checkpoint_to_resume(resume, store, say)
    if checkpoint is None:
        say(f"no checkpoint in {store.folder}: starting from the beginning")
        return Resumed(loaded=with_adapter_settings(loaded), continues=True, checkpoint=None, state=None, done=Done())
    state, loaded = read_state(checkpoint), with_adapter_settings(loaded, checkpoint=checkpoint)
    recipe = loaded.recipe
    _tell_changes(read_recipe(checkpoint), dataclasses.asdict(recipe), say)
    _check_weights_below(checkpoint, loaded)
    if recipe.grpo.beta != 0 and state.window is not None and not state.window.has_reference:
        raise CheckpointError(
            "--resume: grpo.beta was 0 in the checkpoint's run, and its completions have no reference log-probabilities",
            hint="resume from a checkpoint at the end of a generation, or with grpo.beta: 0",
        )
    in_window = 0 if state.window is None else state.window.length - state.position
    return Resumed(
        loaded=loaded,
        continues=checkpoint.is_relative_to(output_dir),
        checkpoint=checkpoint,
        state=state,
        done=Done(steps=state.step + in_window, prompts=state.prompts_drawn),
    )


def _check_weights_below(checkpoint: Path, loaded: LoadedRecipe) -> None:
    """Refuse to put a checkpoint's adapters on other weights than the run has trained them on. That names have changed is told elsewhere."""
    if loaded.recipe.model.lora is None:
        return
    try:
        other_base(checkpoint / MODEL_FOLDER, loaded.recipe.model, loaded.folder, key="model.name_or_path")
    except ModelError as error:
        raise CheckpointError(
            f"--resume: {error.message}", hint="bring back the weights that the run has begun with"
        ) from error


def _tell_changes(before: Mapping[str, Any], now: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Say what has changed in the recipe, and refuse what the checkpoint has decided."""
    for key, (then, value) in changed_keys(before, now).items():
        if key.startswith(_FREE):
            continue
        if key.startswith(_FIXED):
            adapters = (before.get("model") or {}).get("lora") is not None
            raise CheckpointError(
                f"--resume: {key} was {show(then)} in the checkpoint's run, is {show(value)}",
                hint="resume with the value of that run"
                + ("" if adapters else "; a new run can start from the checkpoint's folder `model`"),
            )
        say(f"resuming with a changed recipe: {key} was {show(then)}, is {show(value)}")
