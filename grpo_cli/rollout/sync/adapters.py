"""Adapters among the weights on their way to an engine: they are told from the model's own by their names."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

MARK = "adapters:"
"""No model has such a parameter."""

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for."""


def room_for(rank: int) -> int | None:
    """Give the smallest rank that vLLM makes room for and that holds another; None: it has none so large."""
    return next((room for room in RANKS if room >= rank), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """A live policy's adapters, for engines that take them as such.

    Attributes:
        below: Names and tensors of the frozen weights below them; can be iterated again.
        adapters: Names, such as `model.layers.0.mlp.up_proj.lora_A`, and tensors of the adapters: A [r, inputs], and B [outputs, r]
            with the scale in it; can be iterated again.
        rank: Their rank, r.
    """

    below: Iterable[tuple[str, Tensor]]
    adapters: Iterable[tuple[str, Tensor]]
    rank: int

    def after(self, has_below: Callable[[], bool]) -> "AdaptersToSend":
        """Give what is to be sent to an engine, which says at every iteration whether it has the weights below."""
        return AdaptersToSend(self, has_below)


@dataclass(frozen=True, slots=True)
class AdaptersToSend:
    """Adapters, and the weights below them only as often as these are needed: once, and after they were lost.

    Attributes:
        adapters: Both.
        has_below: Tells whether the weights below are there.
    """

    adapters: Adapters
    has_below: Callable[[], bool]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Give names and tensors."""
        if not self.has_below():
            yield from self.adapters.below
        yield from ((f"{MARK}{name}", tensor) for name, tensor in self.adapters.adapters)


def told_apart(
    named: Sequence[tuple[str, Tensor]],
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Give the model's own weights, and those of adapters under their names."""
    own = [(name, tensor) for name, tensor in named if not name.startswith(MARK)]
    return own, [(name.removeprefix(MARK), tensor) for name, tensor in named if name.startswith(MARK)]
