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


@dataclass(frozen=True, slots=True)
class AdaptersOnBase:
    """Adapters, and the frozen weights below them only as often as these are needed: once, and after they were lost.

    Attributes:
        base: Names and tensors of the weights below; can be iterated again, as can the other.
        adapters: Names, such as `model.layers.0.mlp.up_proj.lora_A`, and tensors of the adapters: A [r, inputs], and B [outputs, r]
            with the scale in it.
        has_base: Tells, at every iteration, whether the weights below are there.
    """

    base: Iterable[tuple[str, Tensor]]
    adapters: Iterable[tuple[str, Tensor]]
    has_base: Callable[[], bool]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Give what is to be sent."""
        if not self.has_base():
            yield from self.base
        yield from ((f"{MARK}{name}", tensor) for name, tensor in self.adapters)


def told_apart(
    named: Sequence[tuple[str, Tensor]],
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Give the model's own weights, and those of adapters under their names."""
    own = [(name, tensor) for name, tensor in named if not name.startswith(MARK)]
    return own, [(name.removeprefix(MARK), tensor) for name, tensor in named if name.startswith(MARK)]
