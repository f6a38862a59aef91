"""Small training groups for the engine's tests."""

from collections.abc import Callable

import pytest
import torch

from grpo_cli.types import PolicyVersion, PromptId, TrainingGroup

GroupMaker = Callable[..., TrainingGroup]


@pytest.fixture
def make_group() -> GroupMaker:
    """Give a function that makes a group with completions of given lengths and recognisable numbers."""

    def make(
        *lengths: int, prompt_length: int = 3, uid: str = "0:0", in_loss: tuple[bool, ...] | None = None
    ) -> TrainingGroup:
        generator = torch.Generator().manual_seed(hash((lengths, prompt_length, uid)) % 2**31)
        return TrainingGroup(
            uid=PromptId(uid),
            prompt_ids=tuple(range(10, 10 + prompt_length)),
            completion_ids=tuple(tuple(range(100, 100 + length)) for length in lengths),
            behaviour_logps=tuple(-torch.rand(length, generator=generator) for length in lengths),
            advantages=torch.randn(len(lengths), generator=generator),
            in_loss=in_loss or (True,) * len(lengths),
            policy_version=PolicyVersion(4),
        )

    return make
