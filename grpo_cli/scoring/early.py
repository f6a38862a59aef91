"""Calls that begin before all of a step's completions are there."""

from collections.abc import Sequence

from grpo_cli.scoring.call import Call
from grpo_cli.scoring.event_loop import EventLoop
from grpo_cli.scoring.reward import Reward
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.types import Group, PromptId


class EarlyCalls:
    """Calls of single groups, until somebody asks for them.

    Args:
        loop: Where they run.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._calls: dict[tuple[str, PromptId], Call] = {}

    def start(self, reward: Reward, group: Group, trainer_state: TrainerState) -> None:
        """Begin a call; nothing happens if it has begun, as for a group that an engine has sampled again."""
        key = (reward.name, group.prompt.uid)
        begun = self._calls.get(key)
        if begun is not None and _same(begun.groups[0], group):
            return
        if begun is not None:
            begun.cancel()
        self._calls[key] = Call(reward, [group], trainer_state, self._loop)

    def take(self, reward: Reward, groups: Sequence[Group]) -> Call | None:
        """Give the call of these completions, if it has begun."""
        if len(groups) != 1:
            return None
        begun = self._calls.pop((reward.name, groups[0].prompt.uid), None)
        return begun if begun is not None and _same(begun.groups[0], groups[0]) else None

    def clear(self) -> None:
        """Give up what nobody has asked for."""
        for call in self._calls.values():
            call.cancel()
        self._calls.clear()


def _same(group: Group, other: Group) -> bool:
    return [one.ids for one in group.completions] == [one.ids for one in other.completions]
