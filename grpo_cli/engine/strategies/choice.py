"""Choose how a run is spread over its processes, and make it so."""

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from grpo_cli.device_memory import total_memory
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.strategies.fully_sharded import FullySharded
from grpo_cli.engine.strategies.replicas import Replicas
from grpo_cli.engine.strategies.strategy import Strategy
from grpo_cli.engine.strategies.zero import Zero, check_zero_settings
from grpo_cli.errors import ModelError, Problem, RecipeError, TrainingError
from grpo_cli.policy.load import load_shapes, weights_dtype
from grpo_cli.policy.parts import parameters_of
from grpo_cli.policy.whole_modules import whole_modules
from grpo_cli.recipe.schema import Recipe, VllmSection

SHARE_OF_MEMORY = 0.6
"""What weights, gradients and optimizer states may take of a process's memory, so that activations find room, too."""

BUCKET_ELEMENTS = 2**24
"""Of gradients that are exchanged in one message. DeepSpeed's own choice is thirty times as many, held in memory all the time."""

KNOWS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether torch sums gradients that only some of the processes have."""

_OURS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler", "fp16", "bf16", "amp", "managed_gradient_accumulation"),
)
"""What a user's configuration leaves to the recipe."""


def choose_strategy(recipe: Recipe, *, folder: Path, processes: Processes, say: Callable[[str], None]) -> Strategy:
    """Make the strategy that a recipe asks for.

    Args:
        recipe: The whole recipe.
        folder: Its folder.
        processes: The processes of this run.
        say: Told what `auto` chose and why.

    Raises:
        TrainingError: If it needs DeepSpeed, which is not installed.
        RecipeError: If `distributed.deepspeed_config` cannot be read, or says what the recipe says.
    """
    name: str = recipe.distributed.strategy
    if name == "auto":
        name, reason = automatic_strategy(recipe, folder, processes)
        # The main process decides: others may have other memory.
        name, reason = json.loads(
            processes.from_main(json.dumps([name, reason]).encode() if processes.is_main else None)
        )
        if processes.count > 1:
            say(f"distributed.strategy: {name}, since {reason}")
    if name == "ddp":
        return Replicas(processes)
    if name == "fsdp2":
        return _fully_sharded(recipe, processes)
    if find_spec("deepspeed") is None:
        raise TrainingError(
            f"distributed.strategy: found {recipe.distributed.strategy}, but DeepSpeed is not installed here",
            hint='pip install "grpo-cli[deepspeed]"',
        )
    stage = int(name[-1])
    return Zero(processes, stage=stage, settings=deepspeed_settings(recipe, stage, folder))


def automatic_strategy(recipe: Recipe, folder: Path, processes: Processes) -> tuple[str, str]:
    """Choose between copies of everything and parts of it, and say why."""
    if processes.count == 1:
        return "ddp", "there is one process"
    if recipe.model.quantization is not None:
        return "ddp", "quantized weights are not cut into parts"
    memory = total_memory(processes.device)
    if memory is None:
        return "ddp", f"{processes.device} does not tell its memory"
    try:
        needed = copy_bytes(recipe, load_shapes(recipe.model, folder=folder))
    except ModelError as error:
        return "ddp", f"its size is not known beforehand ({error.message})"
    own = training_memory(recipe.vllm, memory // processes.sharing_memory, processes.device)
    return preferred_strategy(needed, own, processes.count)


def training_memory(vllm: VllmSection, memory: int, device: torch.device) -> int:
    """Give what is left to training of a process's memory, beside a vLLM that does not sleep meanwhile."""
    is_here = vllm.mode == "colocate" or vllm.start
    if device.type == "cpu" or not is_here or vllm.enable_sleep_mode:
        return memory
    return int((1 - vllm.gpu_memory_utilization) * memory)


def copy_bytes(recipe: Recipe, model: nn.Module) -> int:
    """Count the bytes of weights, gradients, the optimizer's two moments, and reference.

    Args:
        recipe: The whole recipe.
        model: It needs no weights, and has no adapters yet.
    """
    lora, has_reference = recipe.model.lora, recipe.grpo.beta != 0.0
    weights = sum(one.nbytes for one in model.parameters())
    if lora is None:
        frozen = {id(one) for part in recipe.model.freeze for one in parameters_of(model, part).values()}
        trained = sum(one.nbytes for one in model.parameters() if id(one) not in frozen)
        return weights * (2 if has_reference else 1) + 3 * trained
    # The matrices are small, and the reference is in the policy; but there are copies of what is trained whole.
    modules = map(model.get_submodule, whole_modules(model, lora.modules_to_save))
    copied = {id(one): one.nbytes for module in modules for one in module.parameters(recurse=False)}
    keeps_reference = has_reference and lora.adapter_name_or_path is not None
    return weights + sum(copied.values()) * (5 if keeps_reference else 4)


def preferred_strategy(needed: int, memory: int | None, processes: int) -> tuple[str, str]:
    """Choose what leaves room for activations, and say why.

    Args:
        needed: Bytes of a copy of everything.
        memory: Bytes that each process has; None: not known.
        processes: How many there are.
    """
    if processes == 1:
        return "ddp", "there is one process"
    if memory is None:
        return "ddp", "the memory of a process is not known"
    found = f"a copy of everything takes {needed / 2**30:,.1f} GiB of the {memory / 2**30:,.1f} GiB that each process has for it"
    return ("ddp", found) if needed <= SHARE_OF_MEMORY * memory else _in_parts(found)


def _in_parts(found: str) -> tuple[str, str]:
    """Choose what cuts weights into parts, of what is installed.

    Args:
        found: Why they have to be cut.
    """
    if find_spec("deepspeed") is not None:
        return "deepspeed_zero3", found
    if KNOWS_UNUSED:
        return "fsdp2", f"{found}, and DeepSpeed is not installed"
    return "ddp", f"neither DeepSpeed nor a newer PyTorch is installed, without which each process has a copy; {found}"


def _fully_sharded(recipe: Recipe, processes: Processes) -> FullySharded:
    if not KNOWS_UNUSED:
        raise TrainingError(
            f"distributed.strategy: fsdp2 needs a newer PyTorch than {torch.__version__}",
            hint='pip install -U "torch>=2.13", or take deepspeed_zero3',
        )
    return FullySharded(processes, bf16=recipe.train.bf16, offload=recipe.distributed.offload_params)


def deepspeed_settings(recipe: Recipe, stage: int, folder: Path) -> dict[str, Any]:
    """Make DeepSpeed's configuration of the recipe's."""
    section = recipe.distributed
    settings = {} if section.deepspeed_config is None else _own_settings(section.deepspeed_config, stage, folder)
    zero = {"reduce_bucket_size": BUCKET_ELEMENTS, **settings.get("zero_optimization", {}), "stage": stage}
    if section.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if section.offload_params:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    rounds = recipe.train.bf16 or weights_dtype(recipe.model, folder=folder) == torch.bfloat16
    return {
        "steps_per_print": 2**62,
        **settings,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed wants numbers; what a micro-batch is, the token budget decides
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # a step takes as many backward passes as it takes
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": rounds},
    }


def _own_settings(name: str, stage: int, folder: Path) -> dict[str, Any]:
    """Read a user's configuration of DeepSpeed."""
    path = next((base / name for base in (folder, Path.cwd()) if (base / name).is_file()), folder / name)
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(path, f"cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise _wrong(path, "holds no JSON object")
    settings: dict[str, Any] = _without_auto(found)
    for refused in _OURS:
        if refused in settings:
            raise _wrong(path, f"sets {refused}, which the recipe decides", hint="leave it out, or set it to auto")
    zero = settings.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise _wrong(path, "zero_optimization holds no JSON object")
    if "compute_grad_norm" in zero:
        raise _wrong(path, "sets zero_optimization.compute_grad_norm, which every run needs", hint="leave it out")
    try:
        check_zero_settings(zero)
    except ValueError as error:
        lines = str(error).splitlines()
        raise _wrong(path, f"zero_optimization: {' '.join(line.strip() for line in lines[1:3]) or error}") from error
    own = zero.get("stage", stage)
    if own != stage:
        raise _wrong(path, f"asks for stage {own}, distributed.strategy for {stage}", hint="leave it out there")
    return settings


def _wrong(path: Path, message: str, *, hint: str | None = None) -> RecipeError:
    return RecipeError([Problem(where=str(path), key="distributed.deepspeed_config", message=message, hint=hint)])


def _without_auto(value: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is `auto`: it is the recipe's business, or has a default."""
    kept = {key: _without_auto(one) if isinstance(one, dict) else one for key, one in value.items() if one != "auto"}
    return {key: one for key, one in kept.items() if one != {} or value[key] == {}}
