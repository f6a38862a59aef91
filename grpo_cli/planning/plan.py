"""From a recipe and a machine to numbers: what fits, how much a step is, what it waits for."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from grpo_cli.data.image_columns import has_images
from grpo_cli.data.sources import load_rows
from grpo_cli.engine.demand import Demand, image_tokens
from grpo_cli.engine.memory import cached_tokens_that_fit, estimate_memory, tokens_that_fit
from grpo_cli.engine.memory_estimate import MemoryEstimate
from grpo_cli.engine.named_parts import put_parts
from grpo_cli.engine.prompts import load_prompts
from grpo_cli.engine.strategies.choice import copy_bytes, deepspeed_settings, preferred_strategy, training_memory
from grpo_cli.engine.strategies.spread import Spread, spread_of, spread_of_zero
from grpo_cli.engine.vision import VisionLoader
from grpo_cli.errors import DataError
from grpo_cli.planning.machine import Machine
from grpo_cli.planning.work import Model, StepWork, step_seconds, step_work
from grpo_cli.policy.checkpointing import possible_checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_shapes, load_tokenizer
from grpo_cli.policy.quantization import plan_quantization
from grpo_cli.recipe.schema import Recipe
from grpo_cli.rollout.cached_values import cached_values_per_token
from grpo_cli.rollout.vllm.arguments import resolved_dtype
from grpo_cli.sharding import whole_bytes, whole_shape
from grpo_cli.types import Sampling
from grpo_cli.vision.inputs import is_vision_language


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change to a recipe or machine with which a run would fit.

    Attributes:
        change: As it would be written.
        total: Bytes of a process then.
    """

    change: str
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """What a run will need.

    Attributes:
        parameters: Of the model.
        trained_parameters: Those that the optimizer moves.
        dtype: Of the weights.
        spread: How the model is spread over the processes.
        reason: Why, if the recipe leaves it open.
        longest_prompt: Tokens.
        micro_batch_tokens: Most tokens in one forward.
        memory: Bytes of a process.
        work: Of an optimizer step.
        seconds: Rough time of a step's parts.
        vllm_needs: Bytes of the share that vLLM has there which its weights and one sequence take.
        remedies: Changes with which a run fits that does not.
    """

    parameters: int
    trained_parameters: int
    dtype: torch.dtype
    spread: Spread
    reason: str | None
    longest_prompt: int
    micro_batch_tokens: int
    memory: MemoryEstimate
    work: StepWork
    seconds: Mapping[str, float]
    vllm_needs: int
    remedies: Sequence[Remedy] = ()

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The part of a step that takes longest, and its share."""
        longest = max(self.seconds, key=lambda part: self.seconds[part])
        return longest, self.seconds[longest] / sum(self.seconds.values())

    @property
    def starves_vllm(self) -> bool:
        """Whether vLLM's share is less than what it cannot do without."""
        return self.vllm_needs > self.memory.vllm

    def is_too_large(self, machine: Machine) -> bool:
        """Tell whether a process, or vLLM in it, would need more than it has, as far as that is known."""
        return machine.memory is not None and (self.memory.total > machine.memory or self.starves_vllm)


def plan_training(recipe: Recipe, *, folder: Path, machine: Machine) -> TrainingPlan:
    """Work out what a recipe needs on a machine.

    Args:
        recipe: The whole recipe.
        folder: Its folder.
        machine: Where it is to train.

    Raises:
        ModelError: If the model's configuration cannot be loaded, or the recipe names a part that the model does not have.
        DataError: If the longest prompt has to be looked for, and the dataset cannot be read.
    """
    shapes = load_shapes(recipe.model, folder=folder)
    policy, longest = _policy(recipe, shapes), longest_prompt(recipe, folder)
    sees = _sees(recipe, shapes, folder)
    plan = _plan(recipe, shapes, policy, longest, machine, folder=folder, sees=sees)
    if not plan.is_too_large(machine):
        return plan
    return replace(plan, remedies=_remedies(recipe, shapes, policy, longest, machine, folder=folder, sees=sees))


def _plan(
    recipe: Recipe, model: Any, policy: PolicyModel, longest: int, machine: Machine, *, folder: Path, sees: bool
) -> TrainingPlan:
    """Work out what a recipe needs for a model of some shapes.

    Args:
        recipe: The whole recipe.
        model: Without weights and adapters.
        policy: Made of it, with the recipe's adapters; both are left alone.
        longest: Tokens of the longest prompt.
        machine: Where it is to train.
        folder: The recipe's.
        sees: Whether prompts have images.
    """
    spread, reason = _spread(recipe, model, machine, folder)
    demand = _demand(recipe, policy, spread, machine, longest, sees=sees)
    work = step_work(
        recipe, longest_prompt=longest, micro_batch_tokens=demand.micro_batch_tokens, processes=machine.processes
    )
    checkpointing = possible_checkpointing(policy.model, recipe.train.gradient_checkpointing, cut=spread.cuts_weights)
    seconds = step_seconds(
        recipe,
        work,
        Model.of(policy.model, bf16=recipe.train.bf16),
        machine=machine,
        spread=spread,
        longest_prompt=longest,
        checkpointing=checkpointing,
    )
    return TrainingPlan(
        parameters=sum(whole_shape(one).numel() for one in policy.parameters()),
        trained_parameters=sum(one.numel() for one in policy.parameters() if one.requires_grad),
        dtype=next(policy.parameters()).dtype,
        spread=spread,
        reason=reason,
        longest_prompt=longest,
        micro_batch_tokens=demand.micro_batch_tokens,
        memory=estimate_memory(
            policy,
            spread=spread,
            device=machine.device,
            train=recipe.train,
            generation=recipe.generation,
            demand=demand,
        ),
        work=work,
        seconds=seconds,
        vllm_needs=_vllm_needs(recipe, model, longest) if demand.vllm else 0,
    )


def _spread(recipe: Recipe, model: Any, machine: Machine, folder: Path) -> tuple[Spread, str | None]:
    """Find how the model will be spread, and if the recipe leaves it open, why."""
    section, processes = recipe.distributed, machine.processes
    name: str = section.strategy
    reason = None
    if name == "auto" and recipe.model.quantization is not None:
        name, reason = "ddp", "quantized weights are not cut into parts"
    elif name == "auto":
        memory = None if machine.memory is None else training_memory(recipe.vllm, machine.memory, machine.device)
        name, reason = preferred_strategy(copy_bytes(recipe, model), memory, processes)
    has_own_memory = machine.device.type != "cpu"
    if name.startswith("deepspeed") and section.deepspeed_config is not None:
        zero = deepspeed_settings(recipe, int(name[-1]), folder)["zero_optimization"]
        return spread_of_zero(name, processes, zero, has_own_memory=has_own_memory), reason
    spread = spread_of(
        name,
        processes,
        offload_optimizer=section.offload_optimizer and has_own_memory,
        offload_params=section.offload_params and has_own_memory,
    )
    return spread, reason


def _demand(
    recipe: Recipe, policy: PolicyModel, spread: Spread, machine: Machine, longest: int, *, sees: bool
) -> Demand:
    """Count what a process has to do, with the budgets that a run would find."""
    train, vllm = recipe.train, _vllm_bytes(recipe, policy, machine)
    models = 2 if _has_second_model(recipe) else 1
    held = models * sum(map(whole_bytes, policy.parameters())) // spread.weight_parts
    awake = 0 if recipe.vllm.enable_sleep_mode else vllm or 0
    free = None if machine.memory is None else machine.memory - held - awake
    budget = train.micro_batch_tokens
    if budget is None:
        seen = image_tokens(
            recipe, processes=machine.processes, longest_prompt=longest, shares_prefix=recipe.model.share_prefix
        )
        budget = tokens_that_fit(
            policy,
            free=free,
            train=train,
            spread=spread,
            device=machine.device,
            group=recipe.grpo.num_generations if recipe.model.share_prefix else 0,
            image_tokens=seen if sees else 0,
        )
    return Demand.of(
        recipe,
        processes=machine.processes,
        micro_batch_tokens=budget,
        longest_prompt=longest,
        shares_prefix=recipe.model.share_prefix,
        with_reference=models > 1,
        vllm=vllm,
        most_cached_tokens=cached_tokens_that_fit(policy, free=free, train=train, spread=spread),
        sees=sees,
    )


def _policy(recipe: Recipe, model: Any) -> PolicyModel:
    """Make the policy of a model without weights, with adapters if the recipe asks for them."""
    model = copy.deepcopy(model)
    put_parts(model, recipe)
    plan_quantization(model, recipe.model)
    return PolicyModel(model, sampling=Sampling(stop_ids=(), max_tokens=recipe.generation.max_completion_length))


def longest_prompt(recipe: Recipe, folder: Path) -> int:
    """Give the tokens of the longest prompt: what the recipe allows, or else what the dataset has, as far as it is prepared.

    Raises:
        DataError: If the dataset is a stream, of which nobody knows.
    """
    if recipe.dataset.max_prompt_length is not None:
        return recipe.dataset.max_prompt_length
    if recipe.dataset.streaming:
        raise DataError(
            "dataset.streaming: how long the prompts of a stream get is not known", hint="set dataset.max_prompt_length"
        )
    tokenizer = load_tokenizer(recipe.model, folder=folder)
    vision = VisionLoader(recipe.model, folder=folder)
    return load_prompts(recipe.dataset, tokenizer, vision=vision, folder=folder, seed=recipe.train.seed).longest_known


def _sees(recipe: Recipe, model: Any, folder: Path) -> bool:
    """Tell whether prompts have images. Of a dataset that is not read it is assumed, if the model could see them."""
    if not is_vision_language(model.config):
        return False
    return recipe.dataset.max_prompt_length is not None or has_images(load_rows(recipe.dataset, folder=folder))


def _has_second_model(recipe: Recipe) -> bool:
    return recipe.grpo.beta != 0 and recipe.model.lora is None


def _vllm_bytes(recipe: Recipe, policy: PolicyModel, machine: Machine) -> int | None:
    """Give what vLLM takes of a training process's memory; None: the built-in engine samples."""
    section = recipe.vllm
    if section.mode is None:
        return None
    if section.mode == "server" and not section.start:
        return 0
    if machine.device.type == "cpu":  # where it has no share to fill: its weights, without its cache
        size = next(policy.parameters()).element_size()
        return size * sum(whole_shape(one).numel() for one in policy.parameters()) // section.tensor_parallel_size
    return int(section.gpu_memory_utilization * (machine.memory or 0))


def _vllm_needs(recipe: Recipe, model: Any, longest: int) -> int:
    """Give the bytes that vLLM's weights and one sequence take of each device."""
    section = recipe.vllm
    first = next(model.parameters())
    name = resolved_dtype(section, bf16=recipe.train.bf16, model_dtype=str(first.dtype).removeprefix("torch."))
    size = int(getattr(torch, name).itemsize)
    values = cached_values_per_token(model.config.get_text_config(), parts=section.tensor_parallel_size) or 0
    weights: int = size * sum(one.numel() for one in model.parameters()) // section.tensor_parallel_size
    return weights + size * values * (longest + recipe.generation.max_completion_length)


def _remedies(
    recipe: Recipe, model: Any, policy: PolicyModel, longest: int, machine: Machine, *, folder: Path, sees: bool
) -> Sequence[Remedy]:
    """Find changes with which a run fits that does not. None of them changes the policy, which takes seconds to make."""
    found = []
    for change, changed, place in _changes(recipe, machine):
        plan = _plan(changed, model, policy, longest, place, folder=folder, sees=sees)
        if not plan.is_too_large(place):
            found.append(Remedy(change=change, total=plan.memory.total))
    return found


def _changes(recipe: Recipe, machine: Machine) -> Sequence[tuple[str, Recipe, Machine]]:
    """List changes worth a try, those that cost least first."""
    in_parts = {"distributed.strategy": "deepspeed_zero3" if find_spec("deepspeed") is not None else "fsdp2"}
    offload = "offload_optimizer" if find_spec("deepspeed") is not None else "offload_params"
    tried: list[dict[str, Any]] = [
        {"train.micro_batch_tokens": 1024},
        {"train.gradient_checkpointing": True},
        in_parts,
        *([{"vllm.enable_sleep_mode": True}] if recipe.vllm.mode == "colocate" else []),
        *([{"vllm.gpu_memory_utilization": 0.2}] if recipe.vllm.mode is not None else []),
        {**in_parts, "train.gradient_checkpointing": True},
        {**in_parts, f"distributed.{offload}": True},
    ]
    changes = []
    for values in tried:
        changed = copy.deepcopy(recipe)
        for name, value in values.items():
            section, key = name.split(".")
            setattr(getattr(changed, section), key, value)
        if changed != recipe:
            written = (f"{name}={json.dumps(value).strip(chr(34))}" for name, value in values.items())
            changes.append((" ".join(written), changed, machine))
    for more in (2, 4, 8):
        processes = more * machine.processes
        changes.append((f"--gpus {processes}", recipe, replace(machine, processes=processes)))
    return changes
