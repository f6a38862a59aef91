"""An estimate of the memory a run needs, by part; meant to be right within a factor of two, before anything is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_cli.device_memory import free_memory
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.strategies.strategy import Strategy
from grpo_cli.policy.checkpointing import Checkpointing, possible_checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.head import LOGITS_PER_CHUNK, LOGITS_PER_CHUNK_ON_ACCELERATORS
from grpo_cli.recipe.schema import GenerationSection, TrainSection
from grpo_cli.rollout.cached_values import cached_values_per_token, positive_integer
from grpo_cli.sharding import whole_bytes, whole_shape

ACTIVATION_FACTOR = 37
"""Values kept per token, layer and hidden unit in a backward without checkpointing; measured on a Llama of 135M parameters."""

SELECTIVE_FACTOR = 15
"""The same with selective checkpointing."""

LOGIT_COPIES = 4
"""Float32 values per logit while the head's backward runs; measured on the same model."""

SAFE_SHARE = 0.5
"""Share of the free memory that an automatic budget takes: what the estimate may be wrong by."""

MOST_TOKENS: Mapping[str, int] = {"cpu": 1024, "cuda": 16_384}
"""Tokens of a micro-batch above which a kind of device gets no faster.

On a CPU a token costs the same with 256 to 1024 of them (Llama of 135M parameters, float32, one thread), 7 % more with 2048 and a
quarter more with 8192. The number for GPUs is no measurement: it is many times what fills their matrix units.
"""
MOST_TOKENS_ELSEWHERE = 4096

LEAST_TOKENS = 64
"""An automatic budget does not go below this: single completions are about as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of one process by part; None: not known for this architecture."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int | None
    head: int | None
    cache: int | None
    vllm: int

    @property
    def total(self) -> int:
        """The sum of what is known; cache and activations are not needed at the same time, so the larger one counts."""
        kept = self.weights + self.gradients + self.optimizer + self.reference + self.vllm
        return kept + max((self.activations or 0) + (self.head or 0), self.cache or 0)


def estimate_memory(
    policy: PolicyModel,
    *,
    strategy: Strategy,
    train: TrainSection,
    generation: GenerationSection,
    micro_batch_tokens: int,
    sequences: int,
    longest_prompt: int,
    with_reference: bool,
    vllm: int | None = None,
) -> MemoryEstimate:
    """Estimate from a model's shapes and the recipe.

    Args:
        policy: The policy; its parameters and its model's configuration are read.
        strategy: What a process keeps of them.
        train: Precision and checkpointing.
        generation: Lengths and the number of sequences sampled at once.
        micro_batch_tokens: Most tokens in one forward.
        sequences: Completions of one optimizer step.
        longest_prompt: Tokens of the longest prompt.
        with_reference: Whether there is a second model.
        vllm: Bytes that vLLM takes of this machine's memory; None: the built-in engine samples, which needs a cache of its own.
    """
    weights = sum(map(whole_bytes, policy.parameters())) // strategy.weight_parts
    longest = longest_prompt + generation.max_completion_length
    tokens = min(micro_batch_tokens, sequences * longest)
    cached_tokens = min(generation.max_num_seqs, sequences) * longest
    return MemoryEstimate(
        weights=weights,
        gradients=_gradient_bytes(policy, strategy),
        optimizer=_optimizer_bytes(policy, strategy),
        reference=weights if with_reference else 0,
        activations=_activations(policy, tokens, train, strategy),
        head=_head(policy, tokens),
        cache=_cache(policy, cached_tokens, train) if vllm is None else 0,
        vllm=vllm or 0,
    )


def automatic_micro_batch_tokens(
    policy: PolicyModel, *, train: TrainSection, processes: Processes, strategy: Strategy
) -> int:
    """Find a token budget that the free memory has room for, with all models loaded and nothing trained yet.

    Gradients and the optimizer's moments come first; a safe share of what they leave is for one micro-batch. The budget is a power
    of two, so that a little more or less free memory gives the same split, and no larger than makes the device faster. All processes
    have the smallest of theirs.
    """
    tokens = MOST_TOKENS.get(processes.device.type, MOST_TOKENS_ELSEWHERE)
    room = _room(policy, processes, strategy)
    while (
        room is not None
        and tokens > LEAST_TOKENS
        and (_activations(policy, tokens, train, strategy) or 0) + (_head(policy, tokens) or 0) > room
    ):
        tokens //= 2
    return processes.least(tokens)


def automatic_cached_tokens(
    policy: PolicyModel, *, train: TrainSection, processes: Processes, strategy: Strategy
) -> int | None:
    """Find how many tokens' keys and values the free memory has room for, with all models loaded and nothing trained yet.

    Sampling and the backward take turns, so both may have the same share. None: not known for this device or architecture.
    """
    room = _room(policy, processes, strategy)
    values = cached_values_per_token(policy.model.config.get_text_config())
    if room is None or values is None:
        return None
    return max(1, int(room / (values * _value_bytes(policy, train))))


def _room(policy: PolicyModel, processes: Processes, strategy: Strategy) -> float | None:
    """Give the safe share of the bytes that gradients and the optimizer's moments will leave free; None: the device does not say."""
    free = free_memory(processes.device)
    if free is None:
        return None
    to_come = _gradient_bytes(policy, strategy) + _moment_bytes(policy, strategy)
    return SAFE_SHARE * (free / processes.sharing_memory - to_come)


def _gradient_bytes(policy: PolicyModel, strategy: Strategy) -> int:
    """Bytes that a process keeps of the gradients."""
    return sum(map(whole_bytes, _trained(policy))) // strategy.gradient_parts


def _moment_bytes(policy: PolicyModel, strategy: Strategy) -> int:
    """Bytes that a process keeps of the optimizer's moments, which its first step makes."""
    one = _float32_bytes(policy) if strategy.optimizes_copies else sum(map(whole_bytes, _trained(policy)))
    return 2 * one // strategy.optimizer_parts


def _optimizer_bytes(policy: PolicyModel, strategy: Strategy) -> int:
    """Bytes of the moments, and of the copies that the optimizer has of the weights."""
    copies = _float32_bytes(policy) // strategy.optimizer_parts if strategy.optimizes_copies else 0
    return _moment_bytes(policy, strategy) + copies


def _float32_bytes(policy: PolicyModel) -> int:
    """Bytes that the trained parameters have in float32."""
    return torch.float32.itemsize * sum(whole_shape(one).numel() for one in _trained(policy))


def _trained(policy: PolicyModel) -> list[Tensor]:
    """List the parameters that the optimizer moves."""
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


def _value_bytes(policy: PolicyModel, train: TrainSection) -> int:
    """Bytes of a number in the forward."""
    return 2 if train.bf16 else next(policy.parameters()).element_size()


def _cache(policy: PolicyModel, tokens: int, train: TrainSection) -> int | None:
    """Bytes of the keys and values of some tokens."""
    values = cached_values_per_token(policy.model.config.get_text_config())
    return None if values is None else tokens * values * _value_bytes(policy, train)


def _activations(policy: PolicyModel, tokens: int, train: TrainSection, strategy: Strategy) -> int | None:
    """Bytes that the backward of a transformer keeps of its layers for some tokens."""
    checkpointing = possible_checkpointing(policy.model, train.gradient_checkpointing, cut=strategy.cuts_weights)
    values = _values_per_token(policy.model, checkpointing)
    return None if values is None else tokens * values * _value_bytes(policy, train)


def _head(policy: PolicyModel, tokens: int) -> int | None:
    """Bytes that embedding and head take while they compute.

    That is a chunk of logits, or all of them, and the gradients of both weight matrices before they are added to those that are there.
    """
    config = policy.model.config.get_text_config()
    vocabulary, hidden = positive_integer(config, "vocab_size"), positive_integer(config, "hidden_size")
    if vocabulary is None or hidden is None:
        return None
    logits = tokens * vocabulary
    if not policy.full_logits:
        device = next(policy.parameters()).device
        logits = min(logits, LOGITS_PER_CHUNK if device.type == "cpu" else LOGITS_PER_CHUNK_ON_ACCELERATORS)
    return (LOGIT_COPIES * logits + 2 * vocabulary * hidden) * torch.float32.itemsize


def _values_per_token(model: Any, checkpointing: Checkpointing) -> int | None:
    """Values that the backward of a transformer keeps per token."""
    config = model.config.get_text_config()
    layers, hidden = positive_integer(config, "num_hidden_layers"), positive_integer(config, "hidden_size")
    if layers is None or hidden is None:
        return None
    if checkpointing is True:  # the input of each layer, and all of the layer that is computed again
        return hidden * (layers + ACTIVATION_FACTOR)
    selective = checkpointing == "selective" and getattr(model, "supports_gradient_checkpointing", False)
    return hidden * layers * (SELECTIVE_FACTOR if selective else ACTIVATION_FACTOR)
