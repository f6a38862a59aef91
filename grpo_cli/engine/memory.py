"""An estimate of the memory a run needs, by part; meant to be right within a factor of two, before anything is allocated."""

from dataclasses import dataclass
from typing import Any

from grpo_cli.recipe.schema import GenerationSection, TrainSection

ACTIVATION_FACTOR = 37
"""Values kept per token, layer and hidden unit in a backward without checkpointing; measured on a Llama of 135M parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes by part; None: not known for this architecture."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int | None
    cache: int | None

    @property
    def total(self) -> int:
        """The sum of what is known; cache and activations are not needed at the same time, so the larger one counts."""
        kept = self.weights + self.gradients + self.optimizer + self.reference
        return kept + max(self.activations or 0, self.cache or 0)


def estimate_memory(
    model: Any,
    *,
    train: TrainSection,
    generation: GenerationSection,
    sequences: int,
    longest_prompt: int,
    with_reference: bool,
) -> MemoryEstimate:
    """Estimate from a model's shapes and the recipe.

    Args:
        model: A transformers model.
        train: Micro-batch budget, precision and checkpointing.
        generation: Lengths and the number of sequences sampled at once.
        sequences: Completions of one optimizer step.
        longest_prompt: Tokens of the longest prompt.
        with_reference: Whether there is a second model.
    """
    parameters = list(model.parameters())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    trained = sum(parameter.numel() * parameter.element_size() for parameter in parameters if parameter.requires_grad)
    value_bytes = 2 if train.bf16 else parameters[0].element_size()
    longest = longest_prompt + generation.max_completion_length
    tokens = min(train.micro_batch_tokens, sequences * longest)
    cached_tokens = min(generation.max_num_seqs, sequences) * longest
    config = model.config.get_text_config()
    activations = _values_per_token(config, checkpointing=train.gradient_checkpointing)
    cache = _cached_values_per_token(config)
    return MemoryEstimate(
        weights=weights,
        gradients=trained,
        optimizer=2 * trained,
        reference=weights if with_reference else 0,
        activations=None if activations is None else tokens * activations * value_bytes,
        cache=None if cache is None else cached_tokens * cache * value_bytes,
    )


def _values_per_token(config: Any, *, checkpointing: bool) -> int | None:
    """Values that the backward of a transformer keeps per token."""
    layers, hidden = _number(config, "num_hidden_layers"), _number(config, "hidden_size")
    if layers is None or hidden is None:
        return None
    return hidden * (layers + ACTIVATION_FACTOR if checkpointing else layers * ACTIVATION_FACTOR)


def _cached_values_per_token(config: Any) -> int | None:
    """Keys and values per token; None for a model without attention heads, which keeps a state of its own kind."""
    layers, heads = _number(config, "num_hidden_layers"), _number(config, "num_attention_heads")
    hidden, head_size = _number(config, "hidden_size"), _number(config, "head_dim")
    if layers is None or heads is None:
        return None
    if head_size is None:
        if hidden is None:
            return None
        head_size = hidden // heads
    return 2 * layers * (_number(config, "num_key_value_heads") or heads) * head_size


def _number(config: Any, name: str) -> int | None:
    """Read a positive integer of a configuration; some families give a list, one number a layer."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None
