"""The global random generators: keep them aside, put them back, write them down."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState:
    """All global generators that a reward function or a library may draw from.

    Attributes:
        python: `random.getstate()` as JSON can hold it.
        numpy: NumPy's global generator, likewise.
        torch: `cpu` and one entry per CUDA device, uint8.
    """

    python: list[Any]
    numpy: list[Any]
    torch: dict[str, Tensor]

    @classmethod
    def capture(cls) -> Self:
        """Read the generators."""
        version, internal, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  the global one is meant
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
        return cls(
            python=[version, list(internal), gauss],
            numpy=[name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
            torch=states,
        )

    def restore(self) -> None:
        """Set the generators; those of devices that this machine does not have are left out."""
        version, internal, gauss = self.python
        random.setstate((version, tuple(internal), gauss))
        name, keys, *rest = self.numpy
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002  the global one is meant
        torch.set_rng_state(self.torch["cpu"])
        for index in range(torch.cuda.device_count()):
            state = self.torch.get(f"cuda:{index}")
            if state is not None:
                torch.cuda.set_rng_state(state, index)


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Run code on generators of its own, so that what it draws changes nothing outside."""
    outside = RandomState.capture()
    seed_everything(seed)
    try:
        yield
    finally:
        outside.restore()


def seed_everything(seed: int) -> None:
    """Seed the global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  the global one is meant
    torch.manual_seed(seed)


def seed_of(*place: int) -> int:
    """Make one seed of a run's own and the place where it is to be used, none of which is negative."""
    return int(np.random.SeedSequence(place).generate_state(1)[0])
