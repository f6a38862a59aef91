"""An estimate of the memory a run needs, by part; meant to be right within a factor of two, before anything is allocated."""

from dataclasses import dataclass
from typing import Any

from grpo_cli.recipe.schema import GenerationSection, TrainSection

ACTIVATION_FACTOR = 37
"""Values kept per token, layer and hidden unit in a backward without checkpointing; measured on a Llama of 135M parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes by part."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    cache: int

    @property
    def total(self) -> int:
        """The sum; cache and activations are not needed at the same time, so the larger one counts."""
        kept = self.weights + self.gradients + self.optimizer + self.reference
        return kept + max(self.activations, self.cache)


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
    config = model.config.get_text_config()
    layers, hidden = config.num_hidden_layers, config.hidden_size
    value_bytes = 2 if train.bf16 else parameters[0].element_size()
    longest = longest_prompt + generation.max_completion_length
    per_layer = min(train.micro_batch_tokens, sequences * longest) * hidden * value_bytes
    if train.gradient_checkpointing:
        activations = per_layer * (layers + ACTIVATION_FACTOR)
    else:
        activations = per_layer * layers * ACTIVATION_FACTOR
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    cache = 2 * min(generation.max_num_seqs, sequences) * longest * layers * key_value_heads * head_size * value_bytes
    return MemoryEstimate(
        weights=weights,
        gradients=trained,
        optimizer=2 * trained,
        reference=weights if with_reference else 0,
        activations=activations,
        cache=cache,
    )
