"""Write the run to disk: checkpoints and the final model, both with a plain Hugging Face folder in them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model, save_model

from grpo_cli.engine.manifest import flush_folder
from grpo_cli.engine.optimizer import continue_schedule
from grpo_cli.engine.stages import Stages
from grpo_cli.engine.state import RECIPE_FILE, RunState, read_optimizer, write_optimizer, write_state
from grpo_cli.errors import CheckpointError

MODEL_FOLDER = "model"
REFERENCE_FILE = "reference.safetensors"


def save_checkpoint(stages: Stages, state: RunState) -> None:
    """Save everything that the next step depends on, under the state's step. All processes have the same; the main one writes it."""
    if not stages.processes.is_main:
        return

    def write(folder: Path) -> None:
        save_model_folder(stages, folder / MODEL_FOLDER)
        write_optimizer(stages.optimizer, folder)
        write_state(state, folder)
        (folder / RECIPE_FILE).write_text(json.dumps(stages.recipe), encoding="utf-8")
        if stages.reference is not None and stages.reference.moves:
            save_model(stages.reference.policy.model, str(folder / REFERENCE_FILE))

    stages.checkpoints.save(state.step, write)


def restore(stages: Stages, state: RunState, folder: Path) -> None:
    """Put the stages where a checkpoint left them. The policy itself was loaded from the checkpoint's model folder."""
    read_optimizer(stages.optimizer, folder)
    if stages.reference is not None and stages.reference.moves:
        if not (folder / REFERENCE_FILE).is_file():
            raise CheckpointError(
                f"{folder} has no reference model: it was written without grpo.sync_ref_model",
                hint="resume with the recipe that the run was started with",
            )
        load_model(stages.reference.policy.model, folder / REFERENCE_FILE)
    stages.prompts.load_state_dict(state.stages["prompts"])
    continue_schedule(stages.schedule, stages.optimizer, steps=state.step)
    stages.scorer.load_state_dict(state.stages["scorer"])
    stages.health.load_state_dict(state.stages["health"])
    if "token_budget" in state.stages:  # checkpoints of older versions have none
        stages.gradients.budget.load_state_dict(state.stages["token_budget"])
    own = folder.parent.resolve() == stages.checkpoints.folder.resolve()
    stages.recorder.load_state_dict(state.stages["recorder"], new_run=not own)
    state.random.restore()


def save_model_folder(stages: Stages, folder: Path) -> None:
    """Save model and tokenizer as a folder that `from_pretrained` reads."""
    model: Any = stages.processes.unwrap(stages.policy).model
    model.save_pretrained(folder)
    stages.tokenizer.save_pretrained(folder)
    for path in folder.iterdir():  # safetensors writes for the owner's eyes only; a model is shared as any file is
        path.chmod(path.stat().st_mode | (0o666 & ~_umask()))


def _umask() -> int:
    """Read the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def save_final_model(stages: Stages, folder: Path) -> Path:
    """Save the trained model under its final name, complete or not at all. The main process writes."""
    if not stages.processes.is_main:
        return folder
    beside = folder.with_name(f".writing-{folder.name}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        save_model_folder(stages, beside)
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
        flush_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        steps = stages.checkpoints.steps()
        hint = f"it is also in {stages.checkpoints.path(steps[-1]) / MODEL_FOLDER}" if steps else None
        raise CheckpointError(f"cannot write the final model to {folder}: {error}", hint=hint) from error
    return folder
