"""How many tokens go through a model at once: what the recipe says or what memory allows, and less once that did not fit."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from grpo_cli.device_memory import is_out_of_memory, release_unused
from grpo_cli.errors import TrainingError

T = TypeVar("T")


class MicroBatchTooLargeError(Exception):
    """A forward or backward found no memory.

    Args:
        tokens: Size of its micro-batch, as micro-batches are measured.
        completions: Completions in it.
    """

    def __init__(self, *, tokens: int, completions: int) -> None:
        super().__init__(tokens, completions)
        self.tokens = tokens
        self.completions = completions


class TokenBudget:
    """The most tokens in one forward. It only ever falls, and is a part of a run's state: another split rounds differently.

    Args:
        tokens: Where it begins.
        asked: `train.micro_batch_tokens`, which `tokens` is if it is not None.
        device: Where the models are.
        sharing: Processes that take of the same memory; what fits with some of them does not with more.
        say: Told when the budget falls.
        falls: Whether a pass that did not fit is done again with smaller micro-batches.

    Attributes:
        tokens: The budget now.
    """

    def __init__(
        self,
        tokens: int,
        *,
        asked: int | None,
        device: torch.device,
        say: Callable[[str], None],
        sharing: int = 1,
        falls: bool = True,
    ) -> None:
        self.tokens = tokens
        self._asked = asked
        self._device = device
        self._sharing = sharing
        self._say = say
        self._falls = falls

    @property
    def automatic(self) -> bool:
        """Whether the recipe left the budget open."""
        return self._asked is None

    def fit(self, work: Callable[[], T]) -> T:
        """Do a pass over micro-batches, and do it again with smaller ones if one does not fit.

        Args:
            work: Splits by `tokens`, and can be repeated; its micro-batches are under `guard`.

        Raises:
            TrainingError: If a single completion does not fit.
        """
        while True:
            try:
                return work()
            except MicroBatchTooLargeError as error:
                tokens, completions = error.tokens, error.completions
            # Only now is the error gone, and with it the frames that held on to the activations.
            release_unused(self._device)
            if completions == 1:
                raise TrainingError(
                    f"out of memory on {self._device}: a single completion, about {tokens:,} tokens with its prompt, does not fit",
                    hint="set train.gradient_checkpointing: true, lower generation.max_completion_length, or on a GPU set "
                    "train.bf16: true",
                )
            if not self._falls:
                raise TrainingError(
                    f"out of memory on {self._device} with a micro-batch of {tokens:,} tokens, in a step that other processes have a part in",
                    hint=f"set train.micro_batch_tokens to less, such as {tokens // 2}, and continue with --resume",
                )
            self.tokens = min(self.tokens, tokens) // 2
            self._say(
                f"out of memory with a micro-batch of {tokens:,} tokens: from here on they have {self.tokens:,} at most "
                "(train.micro_batch_tokens)"
            )

    def lower_to(self, tokens: int) -> None:
        """Do as another process does, for which less fits."""
        if tokens < self.tokens:
            self.tokens = tokens
            self._say(f"out of memory in another process: from here on micro-batches have {tokens:,} tokens at most")

    @contextmanager
    def guard(self, *, tokens: int, completions: int) -> Iterator[None]:
        """Run the forward or backward of one micro-batch.

        Raises:
            MicroBatchTooLargeError: If there is no memory for it.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise MicroBatchTooLargeError(tokens=tokens, completions=completions) from None

    def state_dict(self) -> dict[str, Any]:
        """Give the state for a checkpoint, as JSON."""
        return {"tokens": self.tokens, "asked": self._asked, "device": self._device.type, "sharing": self._sharing}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a checkpoint's budget, unless the recipe now asks for another, or the memory is another."""
        before = (state["asked"], state["device"], state.get("sharing", 1))
        if before == (self._asked, self._device.type, self._sharing):
            self.tokens = int(state["tokens"])
