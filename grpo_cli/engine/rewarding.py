"""Rewards of a generation, in one process or many: the main one scores everything, or each one what it sampled."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_cli.engine.collecting import collected, collected_scores, groups_message, groups_of
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.division import Division
from grpo_cli.engine.randomness import own_randomness, seed_of
from grpo_cli.engine.recording import Recording
from grpo_cli.engine.shared_scoring import Scorer
from grpo_cli.errors import RewardError
from grpo_cli.scoring.runtime import Scores
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.telemetry.names import find
from grpo_cli.types import Group, Prompt, ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """The prompts of a generation.

    Attributes:
        count: Of all processes.
        prompts: Those that this process has to know, by their place.
    """

    count: int
    prompts: Mapping[int, Prompt]

    def at(self, places: range) -> list[Prompt]:
        """Give some of them."""
        return [self.prompts[place] for place in places]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewarded:
    """The rewards of a generation.

    Attributes:
        places: Of the groups that this process has, among all.
        own: Their rewards; metrics are those of the calls that this process made, and problems those of all, in the main process.
        recorded_here: How many of them, the first ones, the main process records.
        holders: Ranks of the processes that have some that it records.
        recorded: All that it records, in the main process.
    """

    places: range
    own: Scores
    recorded_here: int
    holders: range
    recorded: Sequence[ScoredGroup]


class Rewarding(Protocol):
    """Has groups scored."""

    def wanted(self, count: int, *, step: int) -> Sequence[int]:
        """Give the places of the prompts, of so many, that this process has to know, after so many optimizer steps."""
        ...

    def early(self, count: int) -> range:
        """Give the places of those that this process may begin to score as soon as they are completed."""
        ...

    def randomness(self, step: int) -> AbstractContextManager[None]:
        """Make the context in which completions are sampled and scored after so many optimizer steps, for what functions draw."""
        ...

    def score(self, groups: Sequence[Group], drawn: Drawn, trainer_state: TrainerState) -> Rewarded:
        """Score the groups of all processes, each of which gives those that it keeps.

        Raises:
            RewardError: As `Scorer.score` does, or if a function logs a metric under a name of the run's own.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardedByMain:
    """The main process scores: a reward function sees all completions of a generation at once.

    Attributes:
        scorer: Its rewards.
        processes: The processes of this run.
        division: Who samples what.
        recording: What is recorded.
    """

    scorer: Scorer
    processes: Processes
    division: Division
    recording: Recording

    def wanted(self, count: int, *, step: int) -> Sequence[int]:  # noqa: ARG002  the main process always scores
        """See `Rewarding`."""
        return range(count) if self.processes.is_main else self.division.asked(count)

    def early(self, count: int) -> range:
        """See `Rewarding`: all that the main process's engine samples."""
        return self.division.asked(count)

    def randomness(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002  checkpoints have the main process's generators
        """See `Rewarding`."""
        return nullcontext()

    def score(self, groups: Sequence[Group], drawn: Drawn, trainer_state: TrainerState) -> Rewarded:
        """See `Rewarding`."""
        places, names = self.division.kept(drawn.count), self.scorer.names
        recorded = self.recording.places(drawn.count, step=trainer_state.global_step)
        holders = (
            range(min(1, len(recorded))) if self.division.main_only else self.division.holders(recorded, drawn.count)
        )
        here = recorded_among(places, recorded)
        # Where the main process has everything, nobody waits for rewards.
        told = self.processes.count > 1 and not self.division.main_only
        if not self.processes.is_main:
            collected(groups, (), self.processes)
            numbers = self.processes.row_from_main(None, self.processes.most(0)) if told else torch.empty(0)
            scored = _with_rewards(groups, numbers, names)
            own = Scores(groups=scored, metrics={})
            return Rewarded(places=places, own=own, recorded_here=here, holders=holders, recorded=())
        scores = self.scorer.score(collected(groups, drawn.at(range(drawn.count)), self.processes), trainer_state)
        check_logged(scores.logged)
        if told:
            rows = rewards_rows(scores.groups, names, [len(places) for places in self.division.everyones(drawn.count)])
            self.processes.row_from_main(rows, self.processes.most(rows.shape[1]))
        own = replace(scores, groups=scores.groups[places.start : places.stop])
        written = scores.groups[: len(recorded)]
        return Rewarded(places=places, own=own, recorded_here=here, holders=holders, recorded=written)


def recorded_among(places: range, recorded: range) -> int:
    """Count the groups that a process has among those that are recorded: the first of all."""
    return len(range(places.start, min(places.stop, recorded.stop)))


def rewards_rows(scored: Sequence[ScoredGroup], names: Sequence[str], counts: Sequence[int]) -> Tensor:
    """Write what the main process tells of the rewards of all groups: a row for each process, which has zeros at its end.

    Args:
        scored: All groups, by rank.
        names: Of the reward functions.
        counts: How many groups each process has.
    """
    numbers = [
        torch.cat([one.rewards.float().flatten(), torch.tensor([one.dropped, *(name in one.failed for name in names)])])
        for one in scored
    ]
    remaining = iter(numbers)
    rows = [torch.cat([torch.empty(0), *islice(remaining, count)]) for count in counts]
    return pad_sequence(rows, batch_first=True)


def _with_rewards(groups: Sequence[Group], numbers: Tensor, names: Sequence[str]) -> tuple[ScoredGroup, ...]:
    """Read this process's row of `rewards_rows`."""
    scored, start = [], 0
    for group in groups:
        size = len(group.completions) * len(names)
        rewards, (dropped, *failed) = numbers[start : start + size], numbers[start + size :][: 1 + len(names)].tolist()
        start += size + 1 + len(names)
        scored.append(
            ScoredGroup(
                group=group,
                rewards=rewards.view(-1, len(names)).clone(),
                extras={},
                dropped=bool(dropped),
                failed=tuple(name for name, is_failed in zip(names, failed, strict=True) if is_failed),
            )
        )
    return tuple(scored)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardedByEach:
    """Each process scores what it sampled; of what only the main one's engine sampled, an equal part.

    Attributes:
        scorer: This process's rewards.
        processes: The processes of this run.
        division: Who samples what.
        recording: What is recorded.
        seed: Of the run.
    """

    scorer: Scorer
    processes: Processes
    division: Division
    recording: Recording
    seed: int

    def wanted(self, count: int, *, step: int) -> Sequence[int]:
        """See `Rewarding`."""
        recorded = self.recording.places(count, step=step) if self.processes.is_main else range(0)
        return sorted({*recorded, *self.division.asked(count), *self.division.even(count)})

    def early(self, count: int) -> range:
        """See `Rewarding`."""
        return self.division.even(count)

    def randomness(self, step: int) -> AbstractContextManager[None]:
        """See `Rewarding`. Checkpoints have the main process's generators; those of others begin anew, so that a resumed run draws the same."""
        rank = self.processes.rank
        return nullcontext() if rank == 0 else own_randomness(seed_of(self.seed, rank, step))

    def score(self, groups: Sequence[Group], drawn: Drawn, trainer_state: TrainerState) -> Rewarded:
        """See `Rewarding`. Where a function fails in one process, all raise its error."""
        places = self.division.even(drawn.count)
        if self.division.main_only:
            groups = self._handed_out(groups, drawn, places)
        scores, failure = Scores(groups=(), metrics={}), None
        try:
            scores = self.scorer.score(groups, trainer_state)
            check_logged(scores.logged)
        except RewardError as error:
            failure = error
        self.processes.raise_together(failure, RewardError)
        recorded = self.recording.places(drawn.count, step=trainer_state.global_step)
        holders, here = self.division.holders(recorded, drawn.count), recorded_among(places, recorded)
        prompts = drawn.at(recorded) if self.processes.is_main else ()
        everyones = collected_scores(scores.groups[:here], prompts, holders, self.processes)
        own = replace(scores, problems=self._everyones_problems(scores.problems))
        return Rewarded(places=places, own=own, recorded_here=here, holders=holders, recorded=everyones)

    def _handed_out(self, groups: Sequence[Group], drawn: Drawn, places: range) -> list[Group]:
        """Get this process's part of what the main one has."""
        parts = {
            rank: groups_message([groups[place] for place in replace(self.division, rank=rank).even(drawn.count)])
            for rank in range(1, self.processes.count if self.processes.is_main else 0)
        }
        told = self.processes.send(parts, sources=() if self.processes.is_main else (0,))
        if self.processes.is_main:
            return [groups[place] for place in places]
        return groups_of(told[0], iter(drawn.at(places)))

    def _everyones_problems(self, problems: Sequence[str]) -> tuple[str, ...]:
        """Put the problems of all processes together, if there are any."""
        if not self.processes.most(len(problems)):
            return ()
        told = self.processes.gather(json.dumps(problems).encode())
        return tuple(problem for one in told for problem in json.loads(one))


def check_logged(names: Iterable[str]) -> None:
    """Check that reward functions logged nothing under a name that the run's own metrics have.

    Raises:
        RewardError: If one did.
    """
    for name in sorted(names):
        if find(name) is not None:
            raise RewardError(f"log_metric: {name!r} is a metric of the run itself", hint="log it under another name")
