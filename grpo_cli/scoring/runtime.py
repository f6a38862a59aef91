"""Run the reward functions of a step and put their rewards beside the completions."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_cli.errors import CheckpointError, RewardError
from grpo_cli.metrics import Metrics, Sum, merge
from grpo_cli.recipe.schema.rewards import RESERVED_COLUMNS, REWARD_ARGUMENTS
from grpo_cli.scoring.call import Call
from grpo_cli.scoring.early import EarlyCalls
from grpo_cli.scoring.event_loop import EventLoop
from grpo_cli.scoring.isolation.function import end_processes
from grpo_cli.scoring.reward import Reward, has_state
from grpo_cli.scoring.table import Column, Table, lenient_column, put_together, strict_column
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.types import Group, ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The rewards of some groups.

    Attributes:
        groups: In the order that was asked for.
        metrics: What the functions logged with `log_metric`, and what their calls took.
        logged: The names of those metrics that functions logged.
        problems: One line per prompt on which a function failed, and per function that had to be called again.
    """

    groups: tuple[ScoredGroup, ...]
    metrics: Metrics
    logged: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()

    @property
    def failed_prompts(self) -> int:
        """How many prompts a function failed on."""
        return sum(bool(one.failed) for one in self.groups)


class RewardScorer:
    """Scores groups with several rewards: those that are waited for at the same time, the others one after another.

    Args:
        rewards: One column of the table each.
        on_error: `stop` raises at the first function that breaks its contract. `drop` drops the prompts on which one does, `value` gives
            them a reward; a function that fails on several prompts together is called again prompt by prompt for that.
        error_value: That reward.

    Attributes:
        names: The rewards' names, in the order of the columns.
        descriptions: What rewards say of themselves at the start, a line each.

    Raises:
        RewardError: If there is no reward, or two have one name.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        on_error: Literal["stop", "drop", "value"] = "stop",
        error_value: float | None = None,
    ) -> None:
        self.names: tuple[str, ...] = tuple(reward.name for reward in rewards)
        if not self.names:
            raise RewardError("rewards.reward_funcs: there is no reward")
        for name in self.names:
            if self.names.count(name) > 1:
                raise RewardError(f"rewards.reward_funcs: two rewards are named {name!r}", hint="give one a `name`")
        self.descriptions = tuple(
            f"reward {reward.name}: {reward.description}" for reward in rewards if reward.description is not None
        )
        self._rewards = tuple(rewards)
        self._collect = strict_column if on_error == "stop" else lenient_column
        self._error_value = error_value if on_error == "value" else None
        self._loop = EventLoop()
        self._early = EarlyCalls(self._loop)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check before the first rollout that a dataset with these columns has all that the functions need.

        Raises:
            RewardError: Naming the function, the parameter and what is available.
        """
        available = set(REWARD_ARGUMENTS) | (set(columns) - RESERVED_COLUMNS)
        for reward in self._rewards:
            reward.check_available(available)

    def start(self, group: Group, trainer_state: TrainerState) -> None:
        """Begin to score a group that is complete while others are not: with the functions that take one at a time and are waited for.

        A later `score` of the same completions waits for these calls instead of making them.
        """
        for reward in self._rewards:
            # What has a state depends on the order of its calls, which is that of the prompts and not that in which they are complete.
            if reward.limits.per_prompt and reward.is_async and not has_state(reward.source):
                self._early.start(reward, group, trainer_state)

    def score(self, groups: Sequence[Group], trainer_state: TrainerState) -> Scores:
        """Call every reward function, once on the completions of all groups together or once for each.

        Raises:
            RewardError: If a function needs an argument that is not there; or, with `on_error: stop`, raises or returns what it
                must not.
        """
        if not groups:
            return Scores(groups=(), metrics={})
        columns = self._columns(groups, trainer_state)
        table = put_together(columns, groups, error_value=self._error_value)
        return Scores(
            groups=table.groups,
            metrics=merge([*(column.metrics for column in columns), _failures(table)]),
            logged=frozenset().union(*(column.logged for column in columns)),
            problems=table.problems,
        )

    def state_dict(self) -> dict[str, Any]:
        """Collect the state of reward objects that have `state_dict` and `load_state_dict`, by name.

        Raises:
            RewardError: If a state is not JSON.
        """
        state: dict[str, Any] = {}
        for name, source in self._stateful().items():
            try:
                state[name] = _json_copy(source.state_dict())
            except (TypeError, ValueError) as error:
                raise RewardError(f"reward {name!r}: state_dict() must return JSON: {error}") from error
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give reward objects their state back.

        Raises:
            CheckpointError: If it is not the state of these rewards.
        """
        stateful = self._stateful()
        if state.keys() != stateful.keys():
            raise CheckpointError(
                f"the checkpoint holds the state of the rewards {sorted(state)}; "
                f"the rewards of this run that have one are {sorted(stateful)}",
                hint="resume with the rewards that the run started with",
            )
        for name, source in stateful.items():
            source.load_state_dict(_json_copy(state[name]))

    def close(self) -> None:
        """End the event loop and the processes of isolated functions; the next call starts new ones."""
        end_processes(self._rewards)
        for loop in self._loops():
            loop.close()

    def _columns(self, groups: Sequence[Group], trainer_state: TrainerState) -> list[Column]:
        """Start the coroutines, run the plain functions meanwhile, then collect."""
        calls: dict[str, list[Call]] = {}
        try:
            for reward in sorted(self._rewards, key=lambda reward: not reward.is_async):
                parts = [[group] for group in groups] if reward.limits.per_prompt else [groups]
                calls[reward.name] = [
                    self._early.take(reward, part) or Call(reward, part, trainer_state, self._loop) for part in parts
                ]
            return [self._collect(reward, calls[reward.name], trainer_state, self._loop) for reward in self._rewards]
        finally:
            self._early.clear()
            for loop in self._loops():
                loop.cancel()  # what nobody waits for any more

    def _loops(self) -> list[EventLoop]:
        return list(dict.fromkeys([self._loop, *(reward.loop for reward in self._rewards if reward.loop is not None)]))

    def _stateful(self) -> dict[str, Any]:
        """Give the objects whose state belongs into a checkpoint."""
        return {reward.name: reward.source for reward in self._rewards if has_state(reward.source)}


def _failures(table: Table) -> Metrics:
    """Count the prompts that each function failed on, if there are any."""
    return merge({f"reward/{name}/failed_prompts": Sum(1)} for one in table.groups for name in one.failed)


def _json_copy(state: Any) -> Any:
    """Copy a state as a checkpoint would: a reward that changes its own objects later changes no state that was taken."""
    return json.loads(json.dumps(state))
