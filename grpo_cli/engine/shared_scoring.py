"""Reward functions of many processes: loaded in the main one alone, which calls them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from grpo_cli.engine.distributed import Processes
from grpo_cli.scoring.runtime import RewardScorer, Scores
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.types import Group


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
    """The main process's rewards.

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
        """Score groups, in the main process alone.

        Raises:
            RewardError: As `RewardScorer.score` does.
        """
        assert self._scorer is not None, "only the main process calls reward functions"
        return self._scorer.score(groups, trainer_state)

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
