"""Keys and values of the groups being sampled, and the attention that reads them.

A prompt's keys and values are held once for all rows of its group, which attend to them in one matrix product per layer. What a
row has sampled itself stands in its slot of a buffer that is written in place.

It plugs into transformers models as an attention function under a name of its own; the cache travels to it as a keyword
argument of the model's forward. No mask function has that name, so the models build no masks.

Letters: R rows, S slots, K heads of keys and values, N query heads to each of them, D head size, P prompt tokens, W tokens of
the row that has sampled most, C tokens a slot has room for.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from grpo_cli.flash import Sequences, takes
from grpo_cli.rollout.local.group_flash import FlashStep, RowsByGroup
from grpo_cli.rollout.local.group_layer import Arrangement, FedPrompt, Layer, Rows

# Transformers would look for a kernel on the hub if "flash" or a slash were in the name.
NAME = "grpo_group_cache"


def group_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  the cache knows what sees what
    *,
    group_cache: "GroupCache | None" = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **arguments: Any,  # noqa: ARG001  what else transformers passes
) -> tuple[Tensor, None]:
    """Attend as the cache says: prompts to themselves, a row's newest token to its prompt and to what the row has sampled.

    Args:
        module: The attention layer.
        query: float [B, K * N, T, D], rotated: B = 1 row of T packed prompt tokens, or B = R rows of T = 1 token.
        key: float [B, K, T, D].
        value: float [B, K, T, D].
        attention_mask: Ignored.
        group_cache: What was fed before, and what is fed now; None: the model kept it to itself.
        scaling: Of the scores.
        softcap: Bound of the scores; must be None.
        s_aux: Attention sinks; must be None.
        **arguments: Ignored; a window is, too: see `LocalEngine`.

    Returns:
        float [B, T, K * N, D], and None for the attention weights.

    Raises:
        NotImplementedError: If there is no cache, or the layer does more to its scores than scaling them, which a few tokens
            might not show.
    """
    if group_cache is None:
        raise NotImplementedError("its forward passes no arguments on to its attention")
    if softcap is not None:
        raise NotImplementedError("its attention bounds the scores (softcap)")
    if s_aux is not None:
        raise NotImplementedError("its attention has sinks")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    # Under autocast the projections are in a reduced type, and rotating may have brought query and key back to float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    with torch.autocast(query.device.type, enabled=False):
        return group_cache.attend(module, query, key, value, scaling), None


class GroupCache:
    """See the module.

    Before each forward, `feed_prompts` or `feed_rows` says what goes through the model.

    Args:
        slots: Most rows at once (S).
        max_tokens: Most tokens a row samples.
        device: Where the model is.
        flash: Whether a step may be computed by the flash kernel of a GPU, where it takes what the model computes in.

    Attributes:
        numbers: Which group each row belongs to.
        lengths: Tokens of each row in the cache, its prompt not counted.
    """

    def __init__(self, *, slots: int, max_tokens: int, device: torch.device, flash: bool = True) -> None:
        self.numbers: list[int] = []
        self.lengths: list[int] = []
        self._slots = slots
        self._max_tokens = max_tokens
        self._device = device
        self._flash = flash
        self._layers: dict[int, Layer] = {}
        self._prompts: dict[int, FedPrompt] = {}
        self._rows: Rows | None = None
        self._arrangement: Arrangement | None = None
        self._groups: RowsByGroup | None = None
        self._step: FlashStep | None = None

    def feed_prompts(
        self, lengths: Mapping[int, int], both_ways: Mapping[int, Sequence[tuple[int, int]]] | None = None
    ) -> None:
        """Announce a packed row of prompts: one after another, without padding.

        Args:
            lengths: Tokens of each prompt by the number of its group.
            both_ways: First token and number of those that see all of each other, such as an image's, in each prompt that has some.
        """
        self._rows, start = None, 0
        self._prompts = {}
        for number, length in lengths.items():
            runs = both_ways.get(number, ()) if both_ways is not None else ()
            mask = _mask(length, runs, self._device) if runs else None
            self._prompts[number] = FedPrompt(span=slice(start, start + length), mask=mask)
            start += length

    def join(self, numbers: Sequence[int]) -> None:
        """Add empty rows at the end.

        Args:
            numbers: The group of each; its prompt has been fed.
        """
        self.numbers.extend(numbers)
        self.lengths.extend(0 for _ in numbers)
        self._arrangement = self._groups = None

    def feed_rows(self) -> None:
        """Announce one token for each row."""
        if self._arrangement is None:
            self._arrangement = _arrange(self.numbers, self._device)
        width = max(self.lengths) + 1
        # A plain copy would wait for the device.
        lengths = torch.tensor(self.lengths).to(self._device, non_blocking=True)
        bias = None
        if min(self.lengths) + 1 < width:
            unwritten = torch.arange(width, device=self._device) > lengths[:, None]
            bias = torch.zeros(unwritten.shape, device=self._device).masked_fill_(unwritten, -torch.inf)[:, None, None]
        numbers = torch.arange(len(lengths), device=self._device)
        self._step = None
        self._rows = Rows(width=width, numbers=numbers, lengths=lengths, bias=bias, arrangement=self._arrangement)
        for layer in self._layers.values():
            layer.reserve(self._slots, width, self._max_tokens)
        self.lengths = [length + 1 for length in self.lengths]

    def keep(self, places: Sequence[int]) -> None:
        """Go on with some of the rows.

        Args:
            places: The row that each place is taken by; a row that moves moves to a place before its own.
        """
        moved = [(place, row) for place, row in enumerate(places) if place != row]
        if moved:
            targets, sources = torch.tensor(moved, device=self._device).unbind(dim=1)
            width = max(self.lengths[row] for _, row in moved)
            for layer in self._layers.values() if width else ():
                layer.move(targets, sources, width)
        self.numbers = [self.numbers[row] for row in places]
        self.lengths = [self.lengths[row] for row in places]
        self._arrangement = self._groups = None

    def forget_prompts(self, needed: set[int]) -> None:
        """Drop the keys and values of all prompts but those needed."""
        for layer in self._layers.values():
            for number in layer.prompts.keys() - needed:
                del layer.prompts[number]
                self._groups = None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Take in a layer's keys and values and attend to all that the queries see. See `group_attention`."""
        index = cast("int", module.layer_idx)  # transformers numbers its attention layers
        if self._rows is None:
            layer = self._layers.setdefault(index, Layer())
            return layer.attend_prompts(query, key, value, scaling, self._prompts)
        layer = self._layers[index]
        layer.append(key, value, self._rows)
        if self._flash and takes(query):
            return layer.attend_with_flash(query, self._flash_step(layer, query), scaling)
        return layer.attend_rows(query.float() * scaling, self._rows)

    def _flash_step(self, layer: Layer, query: Tensor) -> FlashStep:
        """Prepare a step for the flash kernel, when the first layer comes to it."""
        assert self._rows is not None
        repeats = query.shape[1] // layer.key.shape[1]
        if self._groups is None:
            held = sorted(layer.prompts)
            self._groups = RowsByGroup(
                prompts=Sequences.of(
                    [repeats * self.numbers.count(number) for number in held],
                    [layer.prompts[number][0].shape[1] for number in held],
                    self._device,
                ),
                order=self._rows.arrangement.order,
                back=self._rows.arrangement.back,
            )
        if self._step is None:
            self._step = FlashStep.of(
                self._rows.lengths,
                longest=self._rows.width,
                repeats=repeats,
                room=layer.key.shape[2],
                groups=self._groups,
            )
        return self._step


def _mask(length: int, both_ways: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Say what each token of a prompt sees, bool [P, P]: those before, and all of its own run."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    for start, count in both_ways:
        mask[start : start + count, start : start + count] = True
    return mask


def _arrange(numbers: Sequence[int], device: torch.device) -> Arrangement:
    """Sort rows by their groups' numbers."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    groups, start = [], 0
    while start < len(order):
        number = numbers[order[start]]
        end = start + numbers.count(number)
        groups.append((number, start, end))
        start = end
    back = sorted(range(len(order)), key=order.__getitem__)
    return Arrangement(
        order=None if order == list(range(len(order))) else torch.tensor(order, device=device),
        back=torch.tensor(back, device=device),
        groups=tuple(groups),
    )


AttentionInterface.register(NAME, group_attention)
