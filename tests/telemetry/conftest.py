"""Scored groups and consoles for the telemetry tests."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from rich.console import Console

from grpo_cli.types import Completion, FinishReason, Group, LoggedColumn, PolicyVersion, Prompt, PromptId, ScoredGroup

GroupMaker = Callable[..., ScoredGroup]


@pytest.fixture
def make_scored() -> GroupMaker:
    """Give a function that makes a scored group: one completion per text, length and finish reason."""

    def make(
        texts: Sequence[str],
        rewards: Sequence[Sequence[float]],
        *,
        prompt: str = "Say hi.",
        uid: str = "0:0",
        lengths: Sequence[int] | None = None,
        stopped: Sequence[bool] | None = None,
        extras: Mapping[str, tuple[Any, ...]] | None = None,
        dropped: bool = False,
        images: Sequence[bytes] | None = None,
    ) -> ScoredGroup:
        lengths = lengths or [3] * len(texts)
        stopped = stopped or [True] * len(texts)
        completions = tuple(
            Completion(
                index=index,
                ids=tuple(range(length)),
                logps=torch.zeros(length),
                text=text,
                finish_reason=FinishReason.STOP if stop else FinishReason.LENGTH,
                policy_version=PolicyVersion(7),
            )
            for index, (text, length, stop) in enumerate(zip(texts, lengths, stopped, strict=True))
        )
        row = {"prompt": prompt} | ({} if images is None else {"images": list(images)})
        asked = Prompt(uid=PromptId(uid), ids=(1, 2), text=prompt, messages=None, row=row, images=tuple(images or ()))
        return ScoredGroup(
            group=Group(prompt=asked, completions=completions),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            extras={LoggedColumn(*name.rpartition("/")[::2]): values for name, values in (extras or {}).items()},
            dropped=dropped,
        )

    return make


@pytest.fixture
def plain_console() -> Console:
    """A console that writes to a StringIO, as into a log file."""
    return Console(file=io.StringIO(), width=100, markup=False, highlight=False, emoji=False)


@pytest.fixture
def written(plain_console: Console) -> Callable[[], str]:
    """Give a function that tells what the console has written."""

    def read() -> str:
        assert isinstance(plain_console.file, io.StringIO)
        return plain_console.file.getvalue()

    return read
