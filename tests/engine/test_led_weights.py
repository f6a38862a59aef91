"""Weights that all processes bring together: whoever stops in the middle goes through the rest all the same."""

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.spread_rollouts import LedWeights


class Counted:
    """Counts what is taken, from a generator as the streams of weights are."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for number in range(5):
            self.taken += 1
            yield str(number), torch.ones(1)


def test_an_iteration_that_ends_early_takes_what_is_left() -> None:
    named = Counted()
    stream = iter(LedWeights(named, Processes(bf16=False)))
    assert next(stream)[0] == "0"
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    assert named.taken == 5


def test_a_whole_iteration_gives_everything_once_and_can_be_repeated() -> None:
    named = Counted()
    weights = LedWeights(named, Processes(bf16=False))
    assert [name for name, _ in weights] == [name for name, _ in weights] == list("01234")
    assert named.taken == 10
