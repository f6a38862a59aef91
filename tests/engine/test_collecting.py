"""Scored groups that the main process gets of the others."""

from typing import Any

import torch
from engine.test_state import equal
from engine.threaded_processes import in_threads
from scoring.scoring_groups import group

from grpo_cli.engine.collecting import collected_scores
from grpo_cli.types import LoggedColumn, ScoredGroup


class Stock:
    """Has a method of the name that scalars have, too."""

    def item(self, name: str) -> str:
        return name

    def __str__(self) -> str:
        return "a stock"


def scored(number: int, *, note: tuple[Any, ...]) -> ScoredGroup:
    return ScoredGroup(
        group=group(number, "p", ["a", "bb"]),
        rewards=torch.tensor([[1.0], [2.0]]),
        extras={LoggedColumn("r", "note"): note},
    )


def test_logged_values_arrive_as_numbers_or_texts() -> None:
    of_each = [[scored(0, note=(1, 2))], [scored(1, note=(Stock(), torch.tensor(0.5)))]]
    prompts = [one.group.prompt for groups in of_each for one in groups]
    everyones, nothing = in_threads(2, lambda one: collected_scores(of_each[one.rank], prompts, range(2), one))
    expected = [scored(0, note=(1, 2)), scored(1, note=("a stock", 0.5))]
    assert equal(tuple(everyones), tuple(expected))
    assert nothing == []
