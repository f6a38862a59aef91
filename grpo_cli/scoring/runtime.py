"""Run the reward functions of a step and put their rewards beside the completions."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from grpo_cli.errors import CheckpointError, RewardError
from grpo_cli.metrics import Metrics, merge
from grpo_cli.scoring.call import Call
from grpo_cli.scoring.contract import RESERVED_COLUMNS, TrainerState
from grpo_cli.scoring.event_loop import EventLoop
from grpo_cli.scoring.reward import Reward
from grpo_cli.scoring.table import Column, lenient_column, strict_column, table_rows
from grpo_cli.types import REWARD_ARGUMENTS, Group, ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The rewards of some groups.

    Attributes:
        groups: In the order that was asked for.
        metrics: What the functions logged with `log_metric`, and `time/reward/{name}` in seconds.
        problems: One line per prompt that was dropped, and per function that had to be called again.
    """

    groups: tuple[ScoredGroup, ...]
    metrics: Metrics
    problems: tuple[str, ...] = ()


class RewardScorer:
    """Scores groups with several rewards: async functions at the same time, the others one after another.

    Args:
        rewards: One column of the table each.
        on_error: `stop` raises at the first function that breaks its contract. `drop` drops the prompts on which one does; a
            function that raises is called again prompt by prompt for that.

    Attributes:
        names: The rewards' names, in the order of the columns.

    Raises:
        RewardError: If there is no reward, or two have one name.
    """

    def __init__(self, rewards: Sequence[Reward], *, on_error: Literal["stop", "drop"] = "stop") -> None:
        self.names: tuple[str, ...] = tuple(reward.name for reward in rewards)
        if not self.names:
            raise RewardError("rewards.reward_funcs: there is no reward")
        for name in self.names:
            if self.names.count(name) > 1:
                raise RewardError(f"rewards.reward_funcs: two rewards are named {name!r}", hint="give one a `name`")
        self._rewards = tuple(rewards)
        self._collect = strict_column if on_error == "stop" else lenient_column
        self._loop = EventLoop()

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check before the first rollout that a dataset with these columns has all that the functions need.

        Raises:
            RewardError: Naming the function, the parameter and what is available.
        """
        available = set(REWARD_ARGUMENTS) | (set(columns) - RESERVED_COLUMNS)
        for reward in self._rewards:
            reward.check_available(available)

    def score(self, groups: Sequence[Group], trainer_state: TrainerState) -> Scores:
        """Call every reward function once, on the completions of all groups together.

        Raises:
            RewardError: If a function needs an argument that is not there; or, with `on_error: stop`, raises or returns what it
                must not.
        """
        if not groups:
            return Scores(groups=(), metrics={})
        columns = self._columns(groups, trainer_state)
        scored, problems = table_rows(columns, groups)
        return Scores(
            groups=tuple(scored), metrics=merge(column.metrics for column in columns), problems=tuple(problems)
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
        """End the event loop; the next async reward starts a new one."""
        self._loop.close()

    def _columns(self, groups: Sequence[Group], trainer_state: TrainerState) -> list[Column]:
        """Start the coroutines, run the plain functions meanwhile, then collect."""
        calls: dict[str, Call] = {}
        try:
            for reward in sorted(self._rewards, key=lambda reward: not reward.is_async):
                calls[reward.name] = Call(reward, groups, trainer_state, self._loop)
            return [
                self._collect(reward, calls[reward.name], groups, trainer_state, self._loop) for reward in self._rewards
            ]
        finally:
            self._loop.cancel()  # what nobody waits for any more

    def _stateful(self) -> dict[str, Any]:
        """Give the objects whose state belongs into a checkpoint. Weights of a module are not JSON and do not change here."""
        return {
            reward.name: reward.source
            for reward in self._rewards
            if not isinstance(reward.source, nn.Module | type)
            and hasattr(reward.source, "state_dict")
            and hasattr(reward.source, "load_state_dict")
        }


def _json_copy(state: Any) -> Any:
    """Copy a state as a checkpoint would: a reward that changes its own objects later changes no state that was taken."""
    return json.loads(json.dumps(state))
