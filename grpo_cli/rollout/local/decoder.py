"""The model, one token at a time: what every decoder does, and the one that works with the cache the model itself makes.

Letters: P prompts, R rows, T prompt tokens with padding, A kinds of rotary positions, V vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from grpo_cli.errors import ModelError
from grpo_cli.rollout.local.prompt_images import PromptImages
from grpo_cli.vision.inputs import sees_images_both_ways, token_types


class Decoder(Protocol):
    """Next-token logits for rows that grow by one token at a time.

    Attributes:
        rows_join: Whether rows can join while others are being sampled; otherwise only when there are none.
        mixes_prompts: Whether rows of different prompts can be sampled at once.
        full_enough: Finished rows leave when less than this share of the rows goes on: leaving costs.
    """

    rows_join: bool
    mixes_prompts: bool
    full_enough: float

    def join(self, numbers: Sequence[int]) -> Tensor:
        """Add rows after those that are there.

        Args:
            numbers: Which of the decoder's prompts each row continues; those of one prompt stand together.

        Returns:
            float [len(numbers), V], logits of the first completion token.
        """
        ...

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each row.

        Args:
            tokens: One for each of the R rows.

        Returns:
            float [R, V], logits of the token after it.
        """
        ...

    def keep(self, places: Sequence[int]) -> None:
        """Go on with some of the rows.

        Args:
            places: The row that each place is taken by; a row that moves moves to a place before its own.
        """
        ...


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Switch gradients, dropout and gradient checkpointing off, and put every submodule back into its mode afterwards.

    `torch.inference_mode` would be a little faster, but buffers that some models fill during a forward could then not be used in
    training any more.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def forward_takes(model: Any, argument: str) -> bool:
    """Tell whether a model's forward has an argument, or takes any."""
    parameters = inspect.signature(model.forward).parameters
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return argument in parameters or open_ended


class CacheDecoder:
    """A decoder for every model that returns a cache: its rows begin together, and prompts are padded on the left.

    Where the cache is one whose rows can be copied and dropped, each prompt goes through the model once and its cache is copied
    to the rows of its group. Otherwise every row takes its whole prompt through the model, one prompt at a time, and stays until
    all rows have finished.

    Args:
        model: A transformers causal language model in evaluation mode.
        prompts: What rows continue; none of them empty.
        images: Those of the prompts; None: there are none.

    Raises:
        ModelError: If the model returns no cache.
    """

    rows_join = False

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], images: PromptImages | None = None) -> None:
        self._model = model
        self._prompts = prompts
        self._images = images
        self._device: torch.device = model.get_input_embeddings().weight.device
        self._takes_positions = forward_takes(model, "position_ids")
        self._last_only = {"logits_to_keep": 1} if forward_takes(model, "logits_to_keep") else {}
        self._cache: Any = None
        self._mask: Tensor | None = None
        self._positions = torch.empty(0, 1, dtype=torch.long)
        one = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        self._feed(one, one)  # one token shows which cache the model makes
        # Without positions a model counts padding as tokens, or guesses where a row begins.
        self.mixes_prompts = _is_plain(self._cache) and self._takes_positions
        self.full_enough = 0.875 if self.mixes_prompts else 0.0

    def join(self, numbers: Sequence[int]) -> Tensor:
        """Begin with these rows. See `Decoder.join`."""
        if not self.mixes_prompts:
            return self._feed_prompts(numbers)
        different = list(dict.fromkeys(numbers))
        logits = self._feed_prompts(different)
        rows = [different.index(number) for number in numbers]
        self.keep(rows)
        return logits[torch.tensor(rows, device=self._device)]

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each row. See `Decoder.step`."""
        self._positions = self._positions + 1
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        return self._feed(torch.tensor(tokens, device=self._device)[:, None], self._positions)

    def keep(self, places: Sequence[int]) -> None:
        """Go on with some of the rows. See `Decoder.keep`; here any row may take any number of places."""
        rows = torch.tensor(places, device=self._device)
        self._cache.reorder_cache(rows)
        self._positions = self._positions[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _feed_prompts(self, numbers: Sequence[int]) -> Tensor:
        """Run prompts through the model, padded on the left, and return the logits after each: [len(numbers), V]."""
        prompts = [self._prompts[number] for number in numbers]
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        positions = self._positions_of(numbers, width)
        # Without padding no mask is needed, and attention kernels are faster without one.
        self._mask = None if mask.all() else mask.to(self._device)
        self._cache = None
        # Those of completions go on behind the largest, which an image may have in its midst.
        self._positions = positions.amax(dim=(0, 2))[:, None].to(self._device)
        positions = positions[0] if len(positions) == 1 else positions
        return self._feed(ids.to(self._device), positions.to(self._device), **self._image_arguments(numbers, ids))

    def _positions_of(self, numbers: Sequence[int], width: int) -> Tensor:
        """Give the rotary positions of prompts that are padded on the left: [A, len(numbers), width]."""
        images = self._images
        tables = [
            torch.arange(len(self._prompts[number]))[None] if images is None else images.positions(number)
            for number in numbers
        ]
        return torch.stack([pad(table, (width - table.shape[1], 0)) for table in tables], dim=1)

    def _image_arguments(self, numbers: Sequence[int], ids: Tensor) -> dict[str, Any]:
        """Give what the model is called with for the images of prompts."""
        if self._images is None:
            return {}
        arguments = self._images.encoded(numbers)
        if sees_images_both_ways(self._model):
            arguments["token_type_ids"] = token_types(self._model.config, ids).to(self._device)
        return arguments

    def _feed(self, ids: Tensor, positions: Tensor, **arguments: Any) -> Tensor:
        """Run tokens through the model on top of the cache and return the logits after the last of each row."""
        inputs = {"input_ids": ids, "attention_mask": self._mask, "past_key_values": self._cache, **self._last_only}
        if self._takes_positions:
            inputs["position_ids"] = positions
        outputs = self._model(**inputs, **arguments, use_cache=True)
        self._cache = getattr(outputs, "past_key_values", None)
        if self._cache is None:
            raise ModelError(
                f"the local engine cannot sample from {type(self._model).__name__}: it returns no key-value cache",
                hint="use a model whose forward returns `past_key_values`",
            )
        logits: Tensor = outputs.logits
        return logits[:, -1]


def _is_plain(cache: Any) -> bool:
    """Tell whether a cache consists of transformers' own layers, whose rows can be selected with all of their state.

    Some models keep further state in classes of their own, and inherit a selection that does not know of it.
    """
    return type(cache) is DynamicCache and all(
        type(layer).__module__ == DynamicCache.__module__ for layer in cache.layers
    )
