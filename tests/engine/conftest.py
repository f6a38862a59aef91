"""Small training groups for the engine's tests."""

from collections.abc import Callable
from zlib import crc32

import pytest
import torch

from grpo_cli.types import PromptId, TrainingGroup

GroupMaker = Callable[..., TrainingGroup]


@pytest.fixture
def make_group() -> GroupMaker:
    """Give a function that makes a group with completions of given lengths; the same arguments give the same group."""

    def make(
        *lengths: int, prompt_length: int = 3, uid: str = "0:0", in_loss: tuple[bool, ...] | None = None
    ) -> TrainingGroup:
        generator = torch.Generator().manual_seed(crc32(repr((lengths, prompt_length, uid)).encode()))
        return TrainingGroup(
            uid=PromptId(uid),
            prompt_ids=tuple(range(10, 10 + prompt_length)),
            completion_ids=tuple(
                tuple(torch.randint(100, 250, (length,), generator=generator).tolist()) for length in lengths
            ),
            behaviour_logps=tuple(-torch.rand(length, generator=generator) for length in lengths),
            advantages=torch.randn(len(lengths), generator=generator),
            in_loss=in_loss or (True,) * len(lengths),
        )

    return make
