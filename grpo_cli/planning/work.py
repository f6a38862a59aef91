"""How much an optimizer step is, and which part of it takes longest. The formulas are those of the README's section on `grpo plan`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from grpo_cli.engine.activations import LayerSizes
from grpo_cli.engine.demand import fed_tokens
from grpo_cli.engine.strategies.spread import Spread
from grpo_cli.planning.machine import Machine
from grpo_cli.policy.checkpointing import Checkpointing
from grpo_cli.recipe.addresses import server_addresses
from grpo_cli.recipe.schema import Recipe, VllmSection
from grpo_cli.rollout.cached_values import cached_values_per_token
from grpo_cli.sharding import whole_shape

SEQUENCES_OF_VLLM = 256
"""That vLLM samples at once unless `vllm.engine.max_num_seqs` says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """Work of one optimizer step whose prompts and completions are as long as they are allowed to be.

    Attributes:
        completions: That are trained on.
        sampled_tokens: That are sampled for it: fewer than it trains on where a generation serves several steps.
        trained_tokens: That go through the policy, a prompt once for its completions if it is shared.
        reference_passes: Forwards of the reference over them.
        old_passes: Forwards of the policy over them for old log-probabilities.
        micro_batches: Forwards and backwards of the process that has most.
    """

    completions: int
    sampled_tokens: float
    trained_tokens: int
    reference_passes: float
    old_passes: float
    micro_batches: int


def step_work(recipe: Recipe, *, longest_prompt: int, micro_batch_tokens: int, processes: int) -> StepWork:
    """Count what a recipe asks for."""
    grpo, completion = recipe.grpo, recipe.generation.max_completion_length
    prompts, group = recipe.train.prompts_per_step, recipe.grpo.num_generations
    fed = fed_tokens(
        prompts=prompts,
        group=group,
        longest_prompt=longest_prompt,
        completion=completion,
        shares_prefix=recipe.model.share_prefix,
    )
    completions = math.ceil(prompts * group / processes)  # which are not cut
    mine = max(math.ceil(fed / processes), longest_prompt + completion)
    return StepWork(
        completions=prompts * group,
        sampled_tokens=prompts * group * completion / grpo.num_iterations,
        trained_tokens=fed,
        # Once for a generation, which serves num_iterations passes.
        reference_passes=(1 if grpo.beta else 0) / grpo.num_iterations,
        # The first step of a generation finds them in its own forward.
        old_passes=(grpo.steps_per_generation - 1) / grpo.steps_per_generation / grpo.num_iterations,
        micro_batches=min(completions, max(1, math.ceil(mine / micro_batch_tokens))),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What the time of a step depends on.

    Attributes:
        active: Parameters that a token goes through.
        trained_share: Share of the parameters that take gradients.
        weight_bytes: Of all weights as they are read and exchanged: with `train.bf16`, in bfloat16.
        context_operations: Floating-point operations of a token's attention, by token that it attends to.
        cached_bytes: Of a token's keys and values.
    """

    active: float
    trained_share: float
    weight_bytes: int
    context_operations: float
    cached_bytes: int

    @classmethod
    def of(cls, model: Any, *, bf16: bool = False) -> "Model":
        """Read a model, which needs no weights.

        Args:
            model: A transformers model, possibly with adapters.
            bf16: The recipe's `train.bf16`.
        """
        config = model.config.get_text_config()
        parameters = dict(model.named_parameters())
        count = sum(whole_shape(one).numel() for one in parameters.values())
        layer = LayerSizes.of(config)
        size = 2 if bf16 else next(iter(parameters.values())).element_size()
        return cls(
            active=count - _idle(config, parameters),
            trained_share=sum(whole_shape(one).numel() for one in parameters.values() if one.requires_grad) / count,
            weight_bytes=size * count,
            context_operations=0.0 if layer is None else 4.0 * layer.layers * layer.query,
            cached_bytes=(cached_values_per_token(config) or 0) * size,
        )


def _idle(config: Any, parameters: Mapping[str, nn.Parameter]) -> float:
    """Count the parameters of experts that a token does not go through."""
    chosen = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not isinstance(chosen, int) or not isinstance(experts, int) or not experts:
        return 0.0
    inside = sum(whole_shape(one).numel() for name, one in parameters.items() if ".experts." in name)
    return inside * (1 - chosen / experts)


def step_seconds(
    recipe: Recipe,
    work: StepWork,
    model: Model,
    *,
    machine: Machine,
    spread: Spread,
    longest_prompt: int,
    checkpointing: Checkpointing,
) -> dict[str, float]:
    """Estimate where the time of a step goes; good for comparing the parts, not for a calendar.

    Returns:
        Seconds by part of the step.
    """
    speed, completion = machine.speed, recipe.generation.max_completion_length
    context = longest_prompt + completion / 2
    forward = 2 * model.active + model.context_operations * context
    # A backward is two forwards: to inputs, and to the weights that are trained.
    passes = 2 + model.trained_share + (1 if checkpointing is True else 0)
    passes += work.reference_passes + work.old_passes
    exchanged = 2 * model.weight_bytes * model.trained_share  # an all-reduce sends everything twice
    if spread.weight_parts > 1:  # weights come together for each forward and each backward
        exchanged = work.micro_batches * 3 * model.weight_bytes
    uses = recipe.grpo.steps_per_generation * recipe.grpo.num_iterations
    link = speed.link_bytes
    return {
        "sampling": _sampling_seconds(recipe, model, machine, context, forward),
        "forward and backward": work.trained_tokens * passes * forward / (machine.processes * speed.operations),
        "exchange between processes": exchanged / link if machine.processes > 1 else 0.0,
        "new weights to vLLM": model.weight_bytes / link / uses if recipe.vllm.mode is not None else 0.0,
    }


def _sampling_seconds(recipe: Recipe, model: Model, machine: Machine, context: float, forward: float) -> float:
    """Estimate decoding: each token of a batch of sequences reads all weights, and each sequence its keys and values."""
    engines, devices, at_once = _engines(recipe, machine.processes)
    completion = recipe.generation.max_completion_length
    # All of a generation at once, of which this step is a part.
    steps = recipe.grpo.steps_per_generation
    sequences = math.ceil(recipe.train.prompts_per_step * recipe.grpo.num_generations * steps / engines)
    batch = min(sequences, at_once)
    read = (model.weight_bytes + batch * context * model.cached_bytes) / (devices * machine.speed.memory_bytes)
    computed = batch * forward / (devices * machine.speed.operations)
    return sequences / batch * completion * max(read, computed) / (steps * recipe.grpo.num_iterations)


def _engines(recipe: Recipe, processes: int) -> tuple[int, int, int]:
    """Give the number of engines, devices of each, and sequences that each samples at once."""
    vllm = recipe.vllm
    if vllm.mode is None:
        return processes, 1, recipe.generation.max_num_seqs
    asked = vllm.engine.get("max_num_seqs")
    at_once = asked if isinstance(asked, int) and asked > 0 else SEQUENCES_OF_VLLM
    return _vllm_engines(vllm, processes), vllm.tensor_parallel_size, at_once


def _vllm_engines(vllm: VllmSection, processes: int) -> int:
    if vllm.mode == "colocate":
        return max(1, processes // vllm.tensor_parallel_size)
    return len(server_addresses(vllm)) * vllm.data_parallel_size
