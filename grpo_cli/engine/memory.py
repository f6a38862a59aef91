"""The memory that a run needs, by part, before anything is allocated.

What is trained is counted to the byte, activations by the formulas of `activations`. The test against measured peaks of whole runs asks
for 20 %, where the C library gives what is free back at once.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from grpo_cli.device_memory import free_memory
from grpo_cli.engine.activations import Precision, activation_bytes, kept_bytes, precision_of
from grpo_cli.engine.demand import Demand
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.memory_estimate import MemoryEstimate
from grpo_cli.engine.prompt_copies import copied_bytes
from grpo_cli.engine.strategies.spread import Spread
from grpo_cli.engine.vision_activations import tower_bytes
from grpo_cli.onednn import is_faster
from grpo_cli.policy.checkpointing import Checkpointing, possible_checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.head import LOGITS_PER_CHUNK, LOGITS_PER_CHUNK_ON_ACCELERATORS
from grpo_cli.policy.layers import layers_of
from grpo_cli.recipe.schema import GenerationSection, TrainSection
from grpo_cli.rollout.cached_values import cached_values_per_token, positive_integer
from grpo_cli.sharding import whole_bytes, whole_shape

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


def estimate_memory(
    policy: PolicyModel,
    *,
    spread: Spread,
    device: torch.device,
    train: TrainSection,
    generation: GenerationSection,
    demand: Demand,
) -> MemoryEstimate:
    """Estimate from a model's shapes and the recipe.

    Args:
        policy: The policy; its parameters and its model's configuration are read.
        spread: What a process keeps of them.
        device: Where it computes.
        train: Precision and checkpointing.
        generation: Lengths and the number of sequences sampled at once.
        demand: What the process has to do.
    """
    floats = sum(whole_bytes(one) for one in policy.parameters() if one.is_floating_point())
    packed = sum(map(whole_bytes, policy.parameters())) - floats  # which stay as they are
    whole = packed + _held(policy, floats, train, spread)
    weights = 0 if spread.offload_params else whole // spread.weight_parts
    longest = demand.longest_prompt + generation.max_completion_length
    # A completion is not cut, however small the budget.
    tokens = min(max(demand.micro_batch_tokens, longest), demand.trained_tokens)
    cached_tokens = min(generation.max_num_seqs, demand.sampled_sequences) * longest
    if demand.most_cached_tokens is not None:
        cached_tokens = min(cached_tokens, max(longest, demand.most_cached_tokens))
    samples = demand.vllm is None
    activations, head = _activations(policy, tokens, train, spread), _head(policy, tokens, train, spread, device)
    of_text = (activations or 0) + (head or 0)
    return MemoryEstimate(
        weights=weights,
        gradients=_held(policy, _gradient_bytes(policy, spread), train, spread),
        optimizer=_optimizer_bytes(policy, spread),
        reference=weights if demand.with_reference else 0,
        gathered=_gathered(policy, train, spread),
        rounded=_rounded(policy, train, spread),
        activations=activations,
        head=head,
        prompt_copies=_copies(policy, tokens, demand.read_keys_of(tokens), longest, train, spread, device),
        images=_images(policy, demand.image_tokens_of(tokens), of_text, train, spread),
        sampled=_sampled(policy, train, spread, device) if samples else 0,
        cache=_cache(policy, cached_tokens, train) if samples else 0,
        vllm=demand.vllm or 0,
        keeps_gradients=spread.optimizes_copies,  # DeepSpeed does
        vllm_sleeps=demand.vllm_sleeps,
    )


def automatic_micro_batch_tokens(
    policy: PolicyModel,
    *,
    train: TrainSection,
    processes: Processes,
    spread: Spread,
    group: int = 0,
    image_tokens: int | None = 0,
) -> int:
    """Find a token budget that the free memory has room for, with all models loaded and nothing trained yet.

    Gradients and the optimizer's moments come first; a safe share of what they leave is for one micro-batch. The budget is a power
    of two, so that a little more or less free memory gives the same split, and no larger than makes the device faster. All processes
    have the smallest of theirs. See `tokens_that_fit` for the rest.
    """
    free = free_memory(processes.device)
    if free is not None:
        free //= processes.sharing_memory
    return processes.least(
        tokens_that_fit(
            policy,
            free=free,
            train=train,
            spread=spread,
            device=processes.device,
            group=group,
            image_tokens=image_tokens,
        )
    )


def tokens_that_fit(
    policy: PolicyModel,
    *,
    free: int | None,
    train: TrainSection,
    spread: Spread,
    device: torch.device,
    group: int = 0,
    image_tokens: int | None = 0,
) -> int:
    """Find the token budget of `automatic_micro_batch_tokens` for one process.

    Args:
        policy: Its parameters and its model's configuration are read.
        free: Bytes that a process has free; None: not known.
        train: Precision and checkpointing.
        spread: What a process keeps.
        device: Where it computes.
        group: Completions that read each prompt where that is fed once; 0: it is not. However short they turn out, of a micro-batch no
            more than this many copies of each token's keys can be needed.
        image_tokens: Most tokens of a step that stand for parts of images; None: not known, it may be all of them.
    """
    tokens = MOST_TOKENS.get(device.type, MOST_TOKENS_ELSEWHERE)
    room = _room(policy, free, spread)

    def needed() -> int:
        seen = tokens if image_tokens is None else min(tokens, image_tokens)
        of_text = (_activations(policy, tokens, train, spread) or 0) + (
            _head(policy, tokens, train, spread, device) or 0
        )
        copies = _copies(policy, tokens, tokens * group, None, train, spread, device)
        return of_text + copies + _images(policy, seen, of_text, train, spread)

    while room is not None and tokens > LEAST_TOKENS and needed() > room:
        tokens //= 2
    return tokens


def automatic_cached_tokens(
    policy: PolicyModel, *, train: TrainSection, processes: Processes, spread: Spread
) -> int | None:
    """Find how many tokens' keys and values the free memory has room for, with all models loaded and nothing trained yet.

    Sampling and the backward take turns, so both may have the same share. None: not known for this device or architecture.
    """
    free = free_memory(processes.device)
    if free is not None:
        free //= processes.sharing_memory
    return cached_tokens_that_fit(policy, free=free, train=train, spread=spread)


def cached_tokens_that_fit(policy: PolicyModel, *, free: int | None, train: TrainSection, spread: Spread) -> int | None:
    """Find the bound of `automatic_cached_tokens` for one process. See `tokens_that_fit`."""
    room = _room(policy, free, spread)
    values = cached_values_per_token(policy.model.config.get_text_config())
    if room is None or values is None:
        return None
    return max(1, int(room / (values * _value_bytes(policy, train))))


def _room(policy: PolicyModel, free: int | None, spread: Spread) -> float | None:
    """Give the safe share of the bytes that gradients and the optimizer's moments will leave of those that are free."""
    if free is None:
        return None
    return SAFE_SHARE * (free - _gradient_bytes(policy, spread) - _moment_bytes(policy, spread))


def _gradient_bytes(policy: PolicyModel, spread: Spread) -> int:
    """Bytes that a process keeps of the gradients."""
    if spread.offload_params and not spread.optimizes_copies:  # with fsdp2
        return 0
    return sum(map(whole_bytes, _trained(policy))) // spread.gradient_parts


def _moment_bytes(policy: PolicyModel, spread: Spread) -> int:
    """Bytes that a process keeps of the optimizer's moments, which its first step makes."""
    if spread.offload_optimizer or (spread.offload_params and not spread.optimizes_copies):
        return 0
    one = _float32_bytes(policy) if spread.optimizes_copies else sum(map(whole_bytes, _trained(policy)))
    return 2 * one // spread.optimizer_parts


def _optimizer_bytes(policy: PolicyModel, spread: Spread) -> int:
    """Bytes of the moments, and of the copies that the optimizer has of the weights."""
    has_copies = spread.optimizes_copies and not spread.offload_optimizer
    copies = _float32_bytes(policy) // spread.optimizer_parts if has_copies else 0
    return _moment_bytes(policy, spread) + copies


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


def _held(policy: PolicyModel, size: int, train: TrainSection, spread: Spread) -> int:
    """Bytes of weights or gradients as a process keeps them: DeepSpeed rounds with `train.bf16`."""
    return _in_use(policy, size, train) if spread.optimizes_copies else size


def _in_use(policy: PolicyModel, size: int, train: TrainSection) -> int:
    """Bytes of weights as they are when they are brought together: with `train.bf16`, in bfloat16."""
    return size * 2 // next(policy.parameters()).element_size() if train.bf16 else size


def _gathered(policy: PolicyModel, train: TrainSection, spread: Spread) -> int:
    """Bytes of what is whole while it is used, where weights are cut into parts."""
    if spread.weight_parts == 1 and not spread.offload_params:
        return _unpacked(policy, train)
    sizes = [sum(map(whole_bytes, layer.parameters())) for layer in layers_of(policy)]
    outside = sum(map(whole_bytes, policy.parameters())) - sum(sizes)
    largest = max(sizes, default=0)
    if spread.live_elements is not None:
        elements = sum(whole_shape(one).numel() for one in policy.parameters())
        live = min(spread.live_elements, elements) * next(policy.parameters()).element_size()
        return _in_use(policy, max(live, outside + largest), train) + _in_use(policy, largest, train)
    # Outside and a layer with their gradients; the next layer, which comes early; what comes, as it came; and a layer's gradients on their
    # way, in float32.
    return _in_use(policy, 2 * (outside + largest) + 3 * largest, train) + _float32(policy, max(outside, largest))


def _unpacked(policy: PolicyModel, train: TrainSection) -> int:
    """Bytes of the largest of the quantized matrices as floats, which it is while it is multiplied with."""
    packed = (whole_shape(one).numel() for one in policy.parameters() if not one.is_floating_point())
    return max(packed, default=0) * _value_bytes(policy, train)


def _sampled(policy: PolicyModel, train: TrainSection, spread: Spread, device: torch.device) -> int:
    """Bytes of what the built-in engine has of the weights while it samples."""
    whole = _in_use(policy, sum(map(whole_bytes, policy.parameters())), train) if spread.weight_parts > 1 else 0
    if _precision(policy, train, spread) == "autocast":
        return whole + _rounded_copies(policy.parameters())
    if device.type != "cpu" or _precision(policy, train, spread) != "float32" or not is_faster():
        return whole
    in_layers = (one for layer in layers_of(policy) for one in layer.parameters())
    return whole + sum(whole_bytes(one) for one in in_layers if len(whole_shape(one)) == 2 and one.is_floating_point())


def _float32(policy: PolicyModel, size: int) -> int:
    """Bytes that some weights would have in float32."""
    return size * torch.float32.itemsize // next(policy.parameters()).element_size()


def _rounded(policy: PolicyModel, train: TrainSection, spread: Spread) -> int:
    """Bytes of the copies that autocast makes of trained float32 matrices, which the backward of a layer that is not computed again reads.

    DeepSpeed and FSDP have rounded them already.
    """
    if _precision(policy, train, spread) != "autocast" or _checkpointing(policy, train, spread) is not False:
        return 0
    return _rounded_copies(_trained(policy))


def _rounded_copies(weights: Iterable[Tensor]) -> int:
    """Bytes of the float32 matrices among weights in bfloat16."""
    matrices = (one for one in weights if one.dtype == torch.float32 and len(whole_shape(one)) > 1)
    return 2 * sum(whole_shape(one).numel() for one in matrices)


def _precision(policy: PolicyModel, train: TrainSection, spread: Spread) -> Precision:
    """Name what the layers compute in: DeepSpeed and FSDP give them rounded weights, and so everything between them is."""
    if train.bf16 and (spread.optimizes_copies or spread.cuts_weights):
        return "bfloat16"
    return precision_of(next(policy.parameters()).dtype, bf16=train.bf16)


def _checkpointing(policy: PolicyModel, train: TrainSection, spread: Spread) -> Checkpointing:
    """Tell what the model does of what the recipe asks for."""
    possible = possible_checkpointing(policy.model, train.gradient_checkpointing, cut=spread.cuts_weights)
    return possible if possible is True or getattr(policy.model, "supports_gradient_checkpointing", False) else False


def _activations(policy: PolicyModel, tokens: int, train: TrainSection, spread: Spread) -> int | None:
    """Bytes that the backward of a transformer keeps of its layers for some tokens."""
    return activation_bytes(
        policy.model.config.get_text_config(),
        tokens,
        checkpointing=_checkpointing(policy, train, spread),
        precision=_precision(policy, train, spread),
    )


def _copies(
    policy: PolicyModel,
    tokens: int,
    read_keys: int,
    longest: int | None,
    train: TrainSection,
    spread: Spread,
    device: torch.device,
) -> int:
    """Bytes of the keys and values that completions have copies of."""
    return copied_bytes(
        policy,
        tokens,
        read_keys=read_keys,
        longest=longest,
        device=device,
        checkpointing=_checkpointing(policy, train, spread),
        precision=_precision(policy, train, spread),
    )


def _head(policy: PolicyModel, tokens: int, train: TrainSection, spread: Spread, device: torch.device) -> int | None:
    """Bytes that embedding and head take on top of the layers' activations.

    While the head computes there are a chunk of logits, or all of them, and its gradient before it is added to the one that is there.
    A head that is the embedding, too, waits with that for the embedding's, through the backward of all layers.
    """
    config = policy.model.config.get_text_config()
    vocabulary, hidden = positive_integer(config, "vocab_size"), positive_integer(config, "hidden_size")
    if vocabulary is None or hidden is None:
        return None
    logits = tokens * vocabulary
    if not policy.full_logits:
        logits = min(logits, LOGITS_PER_CHUNK if device.type == "cpu" else LOGITS_PER_CHUNK_ON_ACCELERATORS)
    embedding = policy.model.get_input_embeddings().weight
    size: int = embedding.element_size()
    matrix = vocabulary * hidden if embedding.requires_grad else 0
    gradient = matrix * (
        size if size == torch.float32.itemsize else torch.float32.itemsize + size
    )  # summed in float32, then rounded
    # A GPU multiplies with rounded weights (see `products`).
    rounded = (
        2 * vocabulary * hidden if device.type == "cuda" and _precision(policy, train, spread) == "autocast" else 0
    )
    waiting = matrix * size if policy.model.get_output_embeddings().weight is embedding else 0
    kept = kept_bytes(
        config, checkpointing=_checkpointing(policy, train, spread), precision=_precision(policy, train, spread)
    )
    layers = _activations(policy, tokens, train, spread)
    at_head = tokens * (kept or 0) + LOGIT_COPIES * logits * torch.float32.itemsize + gradient + rounded
    in_layers = (layers or 0) + waiting
    return max(at_head, in_layers, gradient + waiting) - (layers or 0)


def _images(policy: PolicyModel, image_tokens: int, of_text: int, train: TrainSection, spread: Spread) -> int:
    """Bytes that a vision tower takes on top of the text model's `of_text`, which are gone when its own backward begins."""
    tower = tower_bytes(
        policy.model,
        image_tokens,
        checkpointing=_checkpointing(policy, train, spread),
        precision=_precision(policy, train, spread),
    )
    return tower.kept + max(0, tower.again - of_text)
