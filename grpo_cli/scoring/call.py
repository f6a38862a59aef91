"""One call of one reward function."""

import inspect
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_cli.errors import RewardError
from grpo_cli.scoring.contract import TrainerState, call_arguments, checked_rewards
from grpo_cli.scoring.event_loop import EventLoop
from grpo_cli.scoring.journal import Journal
from grpo_cli.scoring.reward import Reward
from grpo_cli.types import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one call came to.

    Attributes:
        rewards: Per group float32 [G], or the error of a group whose values are not allowed.
        journal: What the function logged.
    """

    rewards: list[Tensor | RewardError]
    journal: Journal


class Call:
    """A started call. A plain function has already run; an async one runs until `outcome` waits for it.

    Args:
        reward: What to call.
        groups: On which completions.
        trainer_state: For the function.
        loop: Where coroutines run.

    Raises:
        RewardError: If the function needs an argument that is not there.
    """

    def __init__(self, reward: Reward, groups: Sequence[Group], trainer_state: TrainerState, loop: EventLoop) -> None:
        self._reward = reward
        self._groups = groups
        self._journal = Journal(sum(len(group.completions) for group in groups))
        self._seconds = 0.0
        self._result: Future[Any] = Future()
        arguments = reward.select(call_arguments(groups, trainer_state, self._journal))
        if reward.is_async:
            self._result = loop.submit(self._run_async(arguments))
        else:
            self._run(arguments, loop)

    @property
    def seconds(self) -> float:
        """Wall time of the function, known after `outcome`."""
        return self._seconds

    def outcome(self) -> Outcome:
        """Wait for the function and check what it returned.

        Raises:
            RewardError: If it raised, or returned a container of the wrong type or length.
        """
        try:
            returned = self._result.result()
        except (Exception, SystemExit) as error:
            raise raised(self._reward.name, error) from error
        return Outcome(rewards=checked_rewards(self._reward.name, returned, self._groups), journal=self._journal)

    def _run(self, arguments: dict[str, Any], loop: EventLoop) -> None:
        started = time.perf_counter()
        try:
            returned = self._reward.function(**arguments)
            if inspect.isawaitable(returned):  # a plain function that passes a coroutine on
                returned = loop.submit(_awaited(returned)).result()
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a user's function raises is explained by `outcome`
            self._result.set_exception(error)
        else:
            self._result.set_result(returned)
        self._seconds = time.perf_counter() - started

    async def _run_async(self, arguments: dict[str, Any]) -> Any:
        started = time.perf_counter()
        try:
            return await self._reward.function(**arguments)
        except SystemExit as error:  # it would end the event loop, and with it the rewards that are still running
            raise RuntimeError(f"sys.exit({error.code!r})") from error
        finally:
            self._seconds = time.perf_counter() - started


def raised(name: str, error: BaseException, where: str = "") -> RewardError:
    """Explain an exception of a reward function.

    Args:
        name: The reward function's.
        error: What it raised.
        where: The row, such as ` for prompt 0:3, completion 1`, if known.
    """
    text = " ".join(str(error).split())
    detail = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return RewardError(
        f"reward function {name!r} raised {detail}{where}",
        hint="--debug shows the traceback; `rewards.on_error: drop` leaves such prompts out of the step",
    )


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
