"""Adapters among the weights that are sent: what goes, and how it is told apart."""

import pytest
import torch

from grpo_cli.rollout.sync.adapters import Adapters, room_for, told_apart

BASE = [("layer.weight", torch.zeros(2)), ("norm.weight", torch.ones(1))]
ADAPTERS = [("layer.lora_A", torch.full((1, 2), 3.0)), ("layer.lora_B", torch.full((2, 1), 4.0))]


def test_the_weights_below_are_sent_until_they_are_there() -> None:
    there = False
    stream = Adapters(below=BASE, adapters=ADAPTERS, rank=1).after(lambda: there)
    own, adapters = told_apart(list(stream))
    assert own == BASE
    assert adapters == ADAPTERS
    there = True
    own, adapters = told_apart(list(stream))
    assert own == []
    assert adapters == ADAPTERS


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (200, 256), (512, 512), (513, None)])
def test_room_is_the_next_size_that_vllm_has(rank: int, room: int | None) -> None:
    assert room_for(rank) == room
