"""Attention in which the completions of a group share their prompt, as an attention function that transformers models call.

No model code is touched: the function is registered under names of its own and the packed row travels to it as a keyword
argument. Without a packed row it is the attention that the model was loaded with, so that one setting of the model serves the
training forward, the padded forward and generation.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from grpo_cli import flash
from grpo_cli.policy.layout import SharedPrefix
from grpo_cli.policy.split_prompt import SplitPrompt
from grpo_cli.policy.two_part import RowBlocks, two_part_attention
from grpo_cli.policy.two_part_flash import RowSequences, two_part_flash_attention

# Transformers would look for a kernel on the hub if "flash" or a slash were in a name.
NAMES = {
    "sdpa": "grpo_shared_prefix",
    "eager": "grpo_shared_prefix_eager",
    "flex_attention": "grpo_shared_prefix_flex",
    "flash_attention_2": "grpo_shared_prefix_fa2",
    "flash_attention_3": "grpo_shared_prefix_fa3",
}
"""What a model is set to, by what it was loaded with."""

WINDOWED_FAMILIES = frozenset({"gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3"})
"""Model types whose sliding windows reach the attention function as an argument, as their masks say; each has a test."""

_HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "use_cache", "output_router_logits", "layer_idx"})
"""Arguments that change nothing about a packed row's attention; dropout is 0 (see `load.disable_dropout`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rectangle:
    """A group's G completions as rows of the same width W, the shorter ones filled up at the end with their first token.

    Everything is an index that needs no look at a device: a boolean mask would make the host wait for it in every layer.

    Attributes:
        count: G.
        queries: int64 [G * W], the place of each cell among the row's queries.
        keys: int64 [G * W], the same among its keys.
        real: int64 [fed tokens], the cells that are not filled up.
    """

    count: int
    queries: Tensor
    keys: Tensor
    real: Tensor

    @classmethod
    def of(cls, prefix: SharedPrefix, device: torch.device, *, keys_before: int) -> Self:
        """Lay out the fed tokens of a group; `keys_before` are in front of the row's own."""
        starts, lengths = (torch.tensor(numbers) for numbers in zip(*prefix.completions, strict=True))
        offsets = torch.arange(int(lengths.max()))
        present = offsets < lengths[:, None]
        keys = (starts[:, None] + offsets * present).flatten()
        indices = keys - keys_before, keys, present.flatten().nonzero()[:, 0]
        queries, keys, real = (index.to(device) for index in indices)
        return cls(count=len(starts), queries=queries, keys=keys, real=real)

    def cut(self, states: Tensor, places: Tensor) -> Tensor:
        """Take the rows [G, H, W, D] out of states [1, H, T, D]."""
        cells = states[0].index_select(1, places)
        return cells.view(len(cells), self.count, -1, cells.shape[-1]).transpose(0, 1)

    def join(self, rows: Tensor) -> Tensor:
        """Put the real cells of rows [G, H, W, D] one after another: [H, fed tokens, D]."""
        return rows.transpose(0, 1).flatten(1, 2).index_select(1, self.real)


class PackedRow:
    """A packed row as its attention sees it, the same for all layers of one forward.

    Args:
        prefixes: The layout.
        device: Where the row is.
        records: Keeps the keys and values of the one prompt that this row consists of.
        continues: Has the keys and values of the one prompt that the row's completions belong to.
        in_blocks: Whether layers may attend block by block, where there is a kernel for that; if not, with masks.
    """

    def __init__(
        self,
        prefixes: tuple[SharedPrefix, ...],
        device: torch.device,
        *,
        records: SplitPrompt | None = None,
        continues: SplitPrompt | None = None,
        in_blocks: bool = True,
    ) -> None:
        self.prefixes = prefixes
        self.in_blocks = in_blocks
        self.records = records
        self.continues = continues
        self.keys_before = 0 if continues is None else len(continues.ids)
        self.blocks = RowBlocks.of(prefixes, keys_before=self.keys_before)
        self.longest = max(
            prefix.length + max((length for _, length in prefix.completions), default=0) for prefix in prefixes
        )
        self._device = device
        self._rectangles: dict[SharedPrefix, Rectangle] = {}
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    @cached_property
    def sequences(self) -> RowSequences:
        """The blocks as a GPU's kernel takes them."""
        return RowSequences.of(self.blocks, self._device, keys_before=self.keys_before)

    def rectangle(self, prefix: SharedPrefix) -> Rectangle:
        """Where a group's fed completion tokens stand."""
        if prefix not in self._rectangles:
            self._rectangles[prefix] = Rectangle.of(prefix, self._device, keys_before=self.keys_before)
        return self._rectangles[prefix]

    def prompt_mask(self, prefix: SharedPrefix, window: int | None) -> Tensor:
        """Bool [P, P]: what each token of a prompt sees of it."""
        if not prefix.images:
            return self.mask(0, prefix.length, window)
        # Gemma 3: tokens of one image see each other, and a window bounds what is before.
        mask = torch.ones(prefix.length, prefix.length, dtype=torch.bool, device=self._device).tril()
        for start, length in prefix.images:
            mask[start : start + length, start : start + length] = True
        return mask if window is None else mask.triu(1 - window)

    def mask(self, before: int, width: int, window: int | None) -> Tensor:
        """Bool [width, before + width]: what each of `width` tokens sees of those before and of its own."""
        key = (before, width, window)
        if key not in self._masks:
            mask = torch.ones(width, before + width, dtype=torch.bool, device=self._device).tril(before)
            self._masks[key] = mask if window is None else mask.triu(before - window + 1)
        return self._masks[key]


def shared_prefix_attention(
    plain: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedRow | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as a packed row says: prompts to themselves, completions to their prompt and to themselves.

    The same numbers as feeding every completion with its own copy of the prompt; gradients of all completions flow into the
    one prompt.

    Args:
        plain: The attention of a row that is not packed.
        module: The attention layer.
        query: float [1, H, T, D], rotated.
        key: float [1, K, T, D], with K dividing H (grouped queries).
        value: float [1, K, T, D].
        attention_mask: Used only without a packed row.
        packed: The row; None: plain attention.
        scaling: Of the scores.
        sliding_window: Tokens that a token sees, itself included; None: all before it.
        softcap: Bounds the scores: softcap * tanh(scores / softcap) (Gemma 2).
        **arguments: What else transformers passes.

    Returns:
        float [1, T, H, D], and attention weights where plain attention gives them.

    Raises:
        ValueError: If the layer asks for something that a packed row does not know.
    """
    if packed is None:
        if softcap is not None:
            arguments["softcap"] = softcap
        return plain(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **arguments
        )
    unknown = [name for name, argument in arguments.items() if name not in _HARMLESS and argument is not None]
    if unknown:
        raise ValueError(f"its attention takes {unknown[0]}")
    query, key, value = _of_one_precision(query, key, value)
    if packed.records is not None:
        packed.records.record(_layer(module), key, value)
    if packed.continues is not None:
        key, value = packed.continues.before(_layer(module), key, value)
    window = None if sliding_window is None or sliding_window >= packed.longest else sliding_window
    both_ways = any(prefix.images for prefix in packed.prefixes)
    if packed.in_blocks and not both_ways and _attends_in_blocks(query, value, window, softcap):
        if flash.takes(query):
            return two_part_flash_attention(query, key, value, packed.sequences, scaling).transpose(1, 2), None
        return two_part_attention(query, key, value, packed.blocks, scaling).transpose(1, 2), None
    return _gathered_attention(packed, query, key, value, scaling, window, softcap), None


def _attends_in_blocks(query: Tensor, value: Tensor, window: int | None, softcap: float | None) -> bool:
    """Tell whether kernels that give log-sum-exps can compute a layer; they know nothing but causality."""
    if window is not None or softcap is not None or query.shape[-1] != value.shape[-1]:
        return False
    return query.device.type == "cpu" or flash.takes(query)


def _of_one_precision(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bring all three to the precision that torch's attention would compute in: rotations leave queries and keys in float32."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _layer(module: nn.Module) -> int:
    """Tell which layer an attention module belongs to."""
    layer: Any = module.layer_idx
    return int(layer)


def _gathered_attention(
    packed: PackedRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend with masks, each group's completions at once as a rectangle: [1, T, H, D].

    Shorter completions are filled up at the end, where causality keeps what is filled in from all real tokens.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, dim=1) if repeats > 1 else states for states in (key, value))
    parts = []
    for prefix in packed.prefixes:
        prompt = slice(prefix.start, prefix.start + prefix.length)
        own_key, own_value = key[:, :, prompt], value[:, :, prompt]
        if not packed.keys_before:
            causal = window is None and softcap is None and not prefix.images
            mask = None if causal else packed.prompt_mask(prefix, window)
            parts.append(_masked_attention(query[:, :, prompt], own_key, own_value, mask, scaling, softcap)[0])
        if not prefix.completions:
            continue
        group = packed.rectangle(prefix)
        queries = group.cut(query, group.queries)
        keys, values = (
            torch.cat([own.expand(group.count, -1, -1, -1), group.cut(states, group.keys)], dim=2)
            for own, states in ((own_key, key), (own_value, value))
        )
        mask = packed.mask(prefix.length, queries.shape[2], window)
        parts.append(group.join(_masked_attention(queries, keys, values, mask, scaling, softcap)))
    return torch.cat(parts, dim=1).transpose(0, 1)[None].contiguous()


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Attention of [B, H, T, D] queries with a bool mask [T, S]; None: each sees those up to itself, for which kernels need no mask."""
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)
    assert mask is not None, "soft-capped scores are masked by hand"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh((query @ key.transpose(-2, -1)) * (scale / softcap))
    scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value


def _plain(implementation: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Find the attention that transformers calls for an implementation; eager attention is each model file's own."""

    def attention(module: nn.Module, *states: Any, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        call = AttentionInterface().get_interface(implementation, eager)
        with _named(implementation, module):
            output: tuple[Tensor, Tensor | None] = call(module, *states, **arguments)
        return output

    return attention


@contextmanager
def _named(implementation: str, module: nn.Module) -> Iterator[None]:
    """Call a layer's attention by its real name: transformers looks flash kernels up by what the layer's config says."""
    config: Any = module.config
    name = config._attn_implementation_internal  # noqa: SLF001  the public name would change the configs of other modalities too
    config._attn_implementation_internal = implementation  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation_internal = name  # noqa: SLF001


for _implementation, _name in NAMES.items():
    AttentionInterface.register(_name, partial(shared_prefix_attention, _plain(_implementation)))
    AttentionMaskInterface.register(_name, AttentionMaskInterface()[_implementation])
