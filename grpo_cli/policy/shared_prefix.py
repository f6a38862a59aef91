"""Attention in which the completions of a group share their prompt, as an attention function that transformers models call.

No model code is touched: the function is registered under a name of its own and the layout of the packed row travels to it as
a keyword argument. Without a layout it is transformers' own scaled-dot-product attention, so that one setting of the model
serves the training forward, the padded forward and generation.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_cli.policy.layout import SharedPrefix

# Transformers would look for a kernel on the hub if "flash" or a slash were in the name.
NAME = "grpo_shared_prefix"

WINDOWED_FAMILIES = frozenset({"gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3"})
"""Model types whose sliding windows reach the attention function as an argument, as their masks say; each has a test."""


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    prefixes: Sequence[SharedPrefix] = (),
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend as the layout of a packed row says: prompts to themselves, completions to their prompt and to themselves.

    The same numbers as feeding every completion with its own copy of the prompt; gradients of all completions flow into the
    one prompt.

    Args:
        module: The attention layer.
        query: float [1, H, T, D], rotated.
        key: float [1, K, T, D], with K dividing H (grouped queries).
        value: float [1, K, T, D].
        attention_mask: Used only without a layout.
        scaling: Of the scores.
        sliding_window: Tokens that a token sees, itself included; None: all before it.
        prefixes: The layout; empty: plain attention.
        **arguments: What else transformers passes.

    Returns:
        float [1, T, H, D], and None for the attention weights.
    """
    if not prefixes:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **arguments
        )
        return output
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, dim=1) if repeats > 1 else states for states in (key, value))
    parts = []
    for prefix in prefixes:
        prompt = slice(prefix.start, prefix.start + prefix.length)
        own_key, own_value = key[:, :, prompt], value[:, :, prompt]
        mask = _causal_mask(0, prefix.length, sliding_window, query.device)
        parts.append(
            scaled_dot_product_attention(query[:, :, prompt], own_key, own_value, attn_mask=mask, scale=scaling)[0]
        )
        if prefix.places.numel():
            parts.append(_completions(prefix, query, key, value, scaling, sliding_window))
    return torch.cat(parts, dim=1).transpose(0, 1)[None].contiguous(), None


def _completions(
    prefix: SharedPrefix, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Attention of a group's completions, all at once: [H, tokens, D].

    Shorter completions are filled up at the end, where causality keeps what is filled in from all real tokens.
    """
    count, width = prefix.places.shape
    prompt = slice(prefix.start, prefix.start + prefix.length)

    def gathered(states: Tensor) -> Tensor:
        return states[0][:, prefix.places].transpose(0, 1)

    def with_prompt(states: Tensor) -> Tensor:
        return torch.cat([states[:, :, prompt].expand(count, -1, -1, -1), gathered(states)], dim=2)

    mask = _causal_mask(prefix.length, width, sliding_window, query.device)
    output = scaled_dot_product_attention(
        gathered(query), with_prompt(key), with_prompt(value), attn_mask=mask, scale=scaling
    )
    return output.transpose(0, 1)[:, prefix.present]


def _causal_mask(before: int, width: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Bool [width, before + width]: what each of `width` tokens sees of those before and of its own."""
    mask = torch.ones(width, before + width, dtype=torch.bool, device=device).tril(before)
    return mask if sliding_window is None else mask.triu(before - sliding_window + 1)


AttentionInterface.register(NAME, shared_prefix_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
