"""From a recipe and a machine to numbers: what fits, how much a step is, what it waits for."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from grpo_cli.engine.memory import MemoryEstimate, estimate_memory, tokens_that_fit
from grpo_cli.engine.prompts import load_prompts
from grpo_cli.engine.strategies.choice import copy_bytes, preferred_strategy
from grpo_cli.engine.strategies.spread import Spread, spread_of
from grpo_cli.planning.machine import Machine
from grpo_cli.planning.work import Model, StepWork, step_seconds, step_work
from grpo_cli.policy.adapters import attach_adapters
from grpo_cli.policy.checkpointing import possible_checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_shapes, load_tokenizer
from grpo_cli.recipe.schema import Recipe
from grpo_cli.types import Sampling


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

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The part of a step that takes longest, and its share."""
        longest = max(self.seconds, key=lambda part: self.seconds[part])
        return longest, self.seconds[longest] / sum(self.seconds.values())

    def is_too_large(self, machine: Machine) -> bool:
        """Tell whether a process would need more than it has, as far as that is known."""
        return machine.memory is not None and self.memory.total > machine.memory


def plan_training(recipe: Recipe, *, folder: Path, machine: Machine) -> TrainingPlan:
    """Work out what a recipe needs on a machine.

    Args:
        recipe: The whole recipe.
        folder: Its folder.
        machine: Where it is to train.

    Raises:
        ModelError: If the model's configuration cannot be loaded.
        DataError: If the longest prompt has to be looked for, and the dataset cannot be read.
    """
    return plan_model(recipe, load_shapes(recipe.model, folder=folder), longest_prompt(recipe, folder), machine)


def plan_model(recipe: Recipe, model: Any, longest: int, machine: Machine) -> TrainingPlan:
    """Work out what a recipe needs for a model of some shapes.

    Args:
        recipe: The whole recipe.
        model: Without weights and adapters; it is left alone.
        longest: Tokens of the longest prompt.
        machine: Where it is to train.
    """
    name: str = recipe.distributed.strategy
    reason = None
    if name == "auto":
        name, reason = preferred_strategy(copy_bytes(recipe, model), machine.memory, machine.processes)
    spread = spread_of(
        name,
        machine.processes,
        offload_optimizer=recipe.distributed.offload_optimizer and machine.device.type != "cpu",
        offload_params=recipe.distributed.offload_params and machine.device.type != "cpu",
    )
    policy = _policy(recipe, model)
    vllm = _vllm_bytes(recipe, policy, machine)
    budget = recipe.train.micro_batch_tokens
    if budget is None:
        budget = _budget(recipe, policy, spread, machine, vllm or 0)
    work = step_work(recipe, longest_prompt=longest, micro_batch_tokens=budget, processes=machine.processes)
    checkpointing = possible_checkpointing(policy.model, recipe.train.gradient_checkpointing, cut=spread.cuts_weights)
    return TrainingPlan(
        parameters=sum(one.numel() for one in policy.parameters()),
        trained_parameters=sum(one.numel() for one in policy.parameters() if one.requires_grad),
        dtype=next(policy.parameters()).dtype,
        spread=spread,
        reason=reason,
        longest_prompt=longest,
        micro_batch_tokens=budget,
        memory=estimate_memory(
            policy,
            spread=spread,
            device=machine.device,
            train=recipe.train,
            generation=recipe.generation,
            micro_batch_tokens=budget,
            sequences=sequences_of_a_process(recipe, machine.processes),
            longest_prompt=longest,
            with_reference=_has_second_model(recipe),
            vllm=vllm,
        ),
        work=work,
        seconds=step_seconds(
            recipe,
            work,
            Model.of(policy.model),
            machine=machine,
            spread=spread,
            longest_prompt=longest,
            checkpointing=checkpointing,
        ),
    )


def _policy(recipe: Recipe, model: Any) -> PolicyModel:
    """Make the policy of a model without weights, with adapters if the recipe asks for them."""
    model = copy.deepcopy(model)
    if recipe.model.lora is not None:
        attach_adapters(model, recipe.model.lora)
    return PolicyModel(model, sampling=Sampling(stop_ids=(), max_tokens=recipe.generation.max_completion_length))


def longest_prompt(recipe: Recipe, folder: Path) -> int:
    """Give the tokens of the longest prompt: what the recipe allows, or else what the dataset has."""
    if recipe.dataset.max_prompt_length is not None:
        return recipe.dataset.max_prompt_length
    tokenizer = load_tokenizer(recipe.model, folder=folder)
    return load_prompts(recipe.dataset, tokenizer, folder=folder, seed=recipe.train.seed).longest or 0


def _has_second_model(recipe: Recipe) -> bool:
    return recipe.grpo.beta != 0 and recipe.model.lora is None


def sequences_of_a_process(recipe: Recipe, processes: int) -> int:
    """Count the completions that one process samples for a step, at most."""
    return -(-recipe.train.prompts_per_step // processes) * recipe.grpo.num_generations


def _vllm_bytes(recipe: Recipe, policy: PolicyModel, machine: Machine) -> int | None:
    """Give what vLLM takes of a training process's memory; None: the built-in engine samples."""
    section = recipe.vllm
    if section.mode is None:
        return None
    if section.mode == "server" and not section.start:
        return 0
    if machine.device.type == "cpu":  # where it has no share to fill: its weights, without its cache
        return sum(one.nbytes for one in policy.parameters()) // section.tensor_parallel_size
    return int(section.gpu_memory_utilization * (machine.memory or 0))


def _budget(recipe: Recipe, policy: PolicyModel, spread: Spread, machine: Machine, vllm: int) -> int:
    """Find the token budget that a run would find, from the memory that is free once the models are there."""
    held = sum(one.nbytes for one in policy.parameters()) // spread.weight_parts
    free = None
    if machine.memory is not None:
        free = machine.memory - held * (2 if _has_second_model(recipe) else 1) - vllm
    return tokens_that_fit(policy, free=free, train=recipe.train, spread=spread, device=machine.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change to a recipe or machine with which a run would fit.

    Attributes:
        change: As it would be written.
        total: Bytes of a process then.
    """

    change: str
    total: int


def remedies(recipe: Recipe, model: Any, longest: int, machine: Machine) -> Sequence[Remedy]:
    """Find changes with which a run fits that does not."""
    assert machine.memory is not None
    found = []
    for change, changed, place in _changes(recipe, machine):
        shapes = copy.deepcopy(model).bfloat16() if changed.model.dtype == "bfloat16" else model
        total = plan_model(changed, shapes, longest, place).memory.total
        if total <= machine.memory:
            found.append(Remedy(change=change, total=total))
    return found


def _changes(recipe: Recipe, machine: Machine) -> Sequence[tuple[str, Recipe, Machine]]:
    """List changes worth a try, those that cost least first."""
    in_parts = {"distributed.strategy": "deepspeed_zero3"}
    tried: list[dict[str, Any]] = [
        {"train.micro_batch_tokens": 1024},
        {"train.gradient_checkpointing": True},
        {"model.dtype": "bfloat16"},
        in_parts,
        {"vllm.gpu_memory_utilization": 0.2},
        {**in_parts, "train.gradient_checkpointing": True},
        {**in_parts, "distributed.offload_optimizer": True},
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
