"""Rewards of many processes: the main one calls the functions, once per completion, and all get the rewards."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.messages import packed, unpacked
from grpo_cli.metrics import from_plain, to_plain
from grpo_cli.scoring.runtime import RewardScorer, Scores
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.types import Group, ScoredGroup


class Scorer(Protocol):
    """Scores groups; see `RewardScorer`.

    Attributes:
        names: The rewards' names, in the order of the columns.
        descriptions: What rewards say of themselves at the start, a line each.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check before the first rollout that a dataset with these columns has all that the rewards need."""
        ...

    def start(self, group: Group, trainer_state: TrainerState) -> None:
        """Begin to score a group."""
        ...

    def score(self, groups: Sequence[Group], trainer_state: TrainerState) -> Scores:
        """Score groups."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Give the state of the rewards for a checkpoint, as JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        ...

    def close(self) -> None:
        """Release what the rewards hold."""
        ...


class SharedScorer:
    """The rewards of all processes.

    A reward function sees all completions of a step at once, whatever the number of processes, and a slow one only lets the others
    wait. The columns that it logs are known to the main process alone, which writes them.

    Args:
        scorer: The main process's; None elsewhere.
        processes: The processes of this run.

    Attributes:
        names: The rewards' names, in the order of the columns.
        descriptions: The main process's, which tells them.
    """

    def __init__(self, scorer: RewardScorer | None, processes: Processes) -> None:
        self._scorer = scorer
        self._processes = processes
        names = None if scorer is None else json.dumps(scorer.names).encode()
        self.names: tuple[str, ...] = tuple(json.loads(processes.from_main(names)))
        self.descriptions = () if scorer is None else scorer.descriptions

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check in the main process.

        Raises:
            RewardError: There, as `RewardScorer.check_columns` does.
        """
        if self._scorer is not None:
            self._scorer.check_columns(columns)

    def start(self, group: Group, trainer_state: TrainerState) -> None:
        """Begin to score a group that the main process's engine has sampled."""
        if self._scorer is not None:
            self._scorer.start(group, trainer_state)

    def score(self, groups: Sequence[Group], trainer_state: TrainerState) -> Scores:
        """Score groups in the main process.

        Raises:
            RewardError: There, as `RewardScorer.score` does.
        """
        if self._scorer is not None:
            scores = self._scorer.score(groups, trainer_state)
            self._processes.from_main(_message(scores))
            return scores
        tensors, told = unpacked(self._processes.from_main(None))
        return Scores(
            groups=tuple(
                ScoredGroup(group=group, rewards=rewards, extras={}, dropped=dropped, failed=tuple(failed))
                for group, rewards, dropped, failed in zip(
                    groups,
                    torch.split(tensors["rewards"], [len(group.completions) for group in groups]),
                    told["dropped"],
                    told["failed"],
                    strict=True,
                )
            ),
            metrics=from_plain(told["metrics"]),
            logged=frozenset(told["logged"]),
            problems=tuple(told["problems"]),
        )

    def state_dict(self) -> dict[str, Any]:
        """Give the state of the main process's rewards."""
        return {} if self._scorer is None else self._scorer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        if self._scorer is not None:
            self._scorer.load_state_dict(state)

    def close(self) -> None:
        """Release what the rewards hold."""
        if self._scorer is not None:
            self._scorer.close()


def _message(scores: Scores) -> bytes:
    told = {
        "dropped": [one.dropped for one in scores.groups],
        "metrics": to_plain(scores.metrics),
        "logged": sorted(scores.logged),
        "problems": list(scores.problems),
        "failed": [list(one.failed) for one in scores.groups],
    }
    return packed({"rewards": torch.cat([one.rewards for one in scores.groups])}, told)
