"""Write the run to disk: checkpoints and the final model, both with a plain Hugging Face folder in them."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from grpo_cli.engine.manifest import flush_folder
from grpo_cli.engine.optimizer import continue_schedule
from grpo_cli.engine.stages import Stages
from grpo_cli.engine.state import RECIPE_FILE, RunState, read_optimizer, write_optimizer, write_state
from grpo_cli.errors import CheckpointError
from grpo_cli.policy.adapter_weights import is_adapter
from grpo_cli.policy.adapters import REFERENCE, has_adapters, keeps_reference, save_adapters
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.quantization import write_quantization
from grpo_cli.recipe.schema import ModelSection

MODEL_FOLDER = "model"
REFERENCE_FOLDER = "reference"

Weights = Mapping[str, Tensor]


def save_checkpoint(stages: Stages, state: RunState) -> None:
    """Save everything that the next step depends on, under the state's step. The main process writes it.

    Of what is cut into parts it writes the models, and each process its share of the optimizer's states: whole ones, so that any number
    of processes can go on from there.
    """
    if stages.strategy.in_step:
        _save_together(stages, state)
        return
    if not stages.processes.is_main:
        return

    def write(folder: Path) -> None:
        _write(stages, state, folder, dict.fromkeys(_models(stages)))
        write_optimizer(dict(stages.strategy.optimizer_states()), folder / "optimizer.safetensors")

    stages.checkpoints.save(state.step, write)


def _save_together(stages: Stages, state: RunState) -> None:
    """Save what no process has all of. All of them come here, and none leaves before all have written."""
    processes = stages.processes
    weights = {name: whole_weights(stages, policy) for name, policy in _models(stages).items()}
    states = {
        number: {name: value.cpu() for name, value in values.items()}
        for number, values in stages.strategy.optimizer_states()
        if number % processes.count == processes.rank
    }

    def write_own(folder: Path) -> None:
        write_optimizer(states, folder / f"optimizer-{processes.rank:05d}-of-{processes.count:05d}.safetensors")

    if not processes.is_main:
        folder = processes.from_main(None)  # nothing, if this checkpoint is there already
        problem = _problem(write_own, Path(folder.decode())) if folder else None
        processes.gather((problem or "").encode())
        return
    began = False

    def write(folder: Path) -> None:
        nonlocal began
        began = True
        processes.from_main(str(folder).encode())
        try:
            _write(stages, state, folder, weights)
            write_own(folder)
        finally:
            problems = processes.gather(b"")
        for problem in filter(None, problems):
            raise OSError(problem.decode())

    try:
        stages.checkpoints.save(state.step, write)
    finally:
        if not began:
            processes.from_main(b"")
            processes.gather(b"")


def _problem(write: Callable[[Path], None], folder: Path) -> str | None:
    """Write something, and say what went wrong."""
    try:
        write(folder)
    except (OSError, SafetensorError) as error:
        return str(error)
    return None


def _models(stages: Stages) -> dict[str, PolicyModel]:
    """Give the models that a checkpoint holds, by the folder that they are in."""
    models = {MODEL_FOLDER: stages.policy}
    if stages.reference is not None and stages.reference.moves:
        models[REFERENCE_FOLDER] = stages.reference.policy
    return models


def _write(stages: Stages, state: RunState, folder: Path, weights: Mapping[str, Weights | None]) -> None:
    """Write what the main process has."""
    for name, policy in _models(stages).items():
        save_model_folder(stages, policy, folder / name, weights=weights[name])
    model = stages.policy.model
    if keeps_reference(model):  # so that the run can go on wherever the adapters are that it began with
        save_adapters(model, folder / REFERENCE_FOLDER, adapter=REFERENCE, weights=weights[MODEL_FOLDER])
    write_state(state, folder)
    (folder / RECIPE_FILE).write_text(json.dumps(stages.recipe), encoding="utf-8")


def restore(stages: Stages, state: RunState, folder: Path) -> None:
    """Put the stages where a checkpoint left them. The policy itself was loaded from the checkpoint's model folder."""
    stages.strategy.load_optimizer_states(read_optimizer(folder, stages.trained_shapes))
    stages.prompts.load_state_dict(state.stages["prompts"])
    continue_schedule(stages.schedule, steps=state.step)
    stages.scorer.load_state_dict(state.stages["scorer"])
    if "reward_memory" in state.stages:  # a version before this one wrote none
        stages.reward_memory.load_state_dict(state.stages["reward_memory"])
    stages.health.load_state_dict(state.stages["health"])
    if "token_budget" in state.stages:  # checkpoints of older versions have none
        stages.gradients.budget.load_state_dict(state.stages["token_budget"])
    own = folder.parent.resolve() == stages.checkpoints.folder.resolve()
    stages.recorder.load_state_dict(state.stages["recorder"], new_run=not own)
    state.random.restore()


def whole_weights(stages: Stages, policy: PolicyModel) -> Weights | None:
    """Bring the weights of a model that are cut into parts together in the main process's memory, those of adapters alone if it has some.

    Returns:
        By name; nothing in other processes; None if every process has all of them anyhow.
    """
    if not stages.strategy.spread.cuts_weights:
        return None
    only_adapters = has_adapters(policy.model)
    return {
        name: tensor.cpu().clone()
        for name, tensor in stages.strategy.named_weights(policy)
        if stages.processes.is_main and (is_adapter(name) or not only_adapters)
    }


def save_model_folder(stages: Stages, policy: PolicyModel, folder: Path, *, weights: Weights | None) -> None:
    """Save model, tokenizer and processor as a folder that `from_pretrained` reads; of a model with adapters these alone.

    Args:
        stages: For the tokenizer and the processor.
        policy: The model.
        folder: Where to.
        weights: From `whole_weights`.
    """
    model: Any = policy.model
    if has_adapters(model):
        save_adapters(model, folder, weights=weights)
        write_quantization(ModelSection(**{**stages.recipe["model"], "lora": None}), folder)
    else:
        model.save_pretrained(folder, state_dict=weights)
    stages.tokenizer.save_pretrained(folder)
    for name, content in stages.model_files.items():
        (folder / name).write_bytes(content)
    for path in folder.iterdir():  # safetensors writes for the owner's eyes only; a model is shared as any file is
        path.chmod(path.stat().st_mode | (0o666 & ~_umask()))


def _umask() -> int:
    """Read the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def save_final_model(stages: Stages, folder: Path) -> Path:
    """Save the trained model under its final name, complete or not at all. The main process writes."""
    weights = whole_weights(stages, stages.policy)
    if not stages.processes.is_main:
        return folder
    beside = folder.with_name(f".writing-{folder.name}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        save_model_folder(stages, stages.policy, beside, weights=weights)
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
        flush_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        steps = stages.checkpoints.steps()
        hint = f"it is also in {stages.checkpoints.path(steps[-1]) / MODEL_FOLDER}" if steps else None
        raise CheckpointError(f"cannot write the final model to {folder}: {error}", hint=hint) from error
    return folder
