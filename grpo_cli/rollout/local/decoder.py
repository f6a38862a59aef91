"""The model, one token at a time: each prompt goes through it once, its cache is copied to the rows of its group.

Letters: P prompts, R rows, T prompt tokens with padding, V vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from grpo_cli.errors import ModelError


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


class Decoder:
    """Next-token logits for a batch of rows that grow in step.

    Args:
        model: A transformers causal language model in evaluation mode.

    Attributes:
        rows_are_independent: Whether the model's cache is one whose rows can be copied and dropped. Otherwise every row takes its
            whole prompt through the model, all prompts of a batch must be of one length, and `keep` must not be called.

    Raises:
        ModelError: If the model returns no cache.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device: torch.device = model.get_input_embeddings().weight.device
        parameters = inspect.signature(model.forward).parameters
        open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        self._takes_positions = "position_ids" in parameters or open_ended
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters or open_ended else {}
        self._cache: Any = None
        self._mask: Tensor | None = None
        self._positions = torch.empty(0, 1, dtype=torch.long)
        self._feed_prompts([[0]])  # one token shows which cache the model makes
        self.rows_are_independent = _is_plain(self._cache)

    def prefill(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:
        """Start rows: `repeats` for each prompt, one prompt after another.

        Args:
            prompts: P prompts, none of them empty.
            repeats: Rows per prompt.

        Returns:
            float [P * repeats, V], logits of the first completion token.
        """
        if not self.rows_are_independent:
            return self._feed_prompts([prompt for prompt in prompts for _ in range(repeats)])
        logits = self._feed_prompts(prompts)
        rows = torch.arange(len(prompts), device=self._device).repeat_interleave(repeats)
        self.keep(rows)
        return logits[rows]

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each row.

        Args:
            tokens: int64 [R].

        Returns:
            float [R, V], logits of the token after it.
        """
        self._positions = self._positions + 1
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        return self._feed(tokens[:, None], self._positions)

    def keep(self, rows: Tensor) -> None:
        """Rebuild the batch from some of its rows; a row may be taken more than once.

        Args:
            rows: int64, their places in the batch.
        """
        self._cache.reorder_cache(rows)
        self._positions = self._positions[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _feed_prompts(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run prompts through the model, padded on the left, and return the logits after each: [len(prompts), V]."""
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0).to(self._device)
        # Without padding no mask is needed, and attention kernels are faster without one.
        self._mask = None if mask.all() else mask.to(self._device)
        self._cache = None
        self._positions = positions[:, -1:]
        return self._feed(ids.to(self._device), positions)

    def _feed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Run tokens through the model on top of the cache and return the logits after the last of each row."""
        inputs = {"input_ids": ids, "attention_mask": self._mask, "past_key_values": self._cache, **self._last_only}
        if self._takes_positions:
            inputs["position_ids"] = positions
        outputs = self._model(**inputs, use_cache=True)
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
