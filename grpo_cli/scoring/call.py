"""One call of one reward function."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tenacity import AsyncRetrying, Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential
from torch import Tensor

from grpo_cli.errors import RewardError
from grpo_cli.recipe.schema.rewards import REWARD_ARGUMENTS
from grpo_cli.scoring.contract import call_arguments, checked_rewards, dataset_columns
from grpo_cli.scoring.event_loop import EventLoop
from grpo_cli.scoring.isolation.failures import LostCallError, ReportedError, TimedOutError, one_line
from grpo_cli.scoring.isolation.reply import Answer
from grpo_cli.scoring.journal import Journal
from grpo_cli.scoring.reward import Reward
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.types import Group

_PAUSE = wait_exponential(multiplier=0.5, max=30)
"""Seconds before a call is made again: 0.5, 1, 2 and so on."""


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
        loop: Where coroutines run, but those of a reward with a loop of its own.
        repeats: Whether the call is made again if it fails, as the reward's limits say.

    Attributes:
        groups: See above.
        seconds: Wall time of the function, repeated calls included, known after `outcome`.
        attempts: Times that it was called, known after `outcome`.

    Raises:
        RewardError: If the function needs an argument that is not there.
    """

    def __init__(
        self,
        reward: Reward,
        groups: Sequence[Group],
        trainer_state: TrainerState,
        loop: EventLoop,
        *,
        repeats: bool = True,
    ) -> None:
        self.groups = groups
        self.seconds = 0.0
        self.attempts = 0
        self._reward = reward
        self._trainer_state = trainer_state
        self._journal = Journal(0)
        self._result: Future[Any] = Future()
        stop, retry = (
            stop_after_attempt(reward.limits.retries + 1 if repeats else 1),
            retry_if_exception_type((Exception, SystemExit)),
        )
        reward.check_available([*REWARD_ARGUMENTS, *dataset_columns(groups)])  # what is missing is told at once
        if reward.is_async:
            self._result = (reward.loop or loop).submit(
                AsyncRetrying(stop=stop, wait=_PAUSE, retry=retry, reraise=True)(self._attempt_async)
            )
        else:
            self._run(Retrying(stop=stop, wait=_PAUSE, retry=retry, reraise=True), loop)

    def outcome(self) -> Outcome:
        """Wait for the function and check what it returned.

        Raises:
            RewardError: If it raised, or returned a container of the wrong type or length.
        """
        try:
            returned = self._result.result()
        except (Exception, SystemExit) as error:
            raise raised(self._reward.name, error) from error
        return Outcome(rewards=checked_rewards(self._reward.name, returned, self.groups), journal=self._journal)

    @property
    def name(self) -> str:
        """The reward's."""
        return self._reward.name

    @property
    def per_prompt(self) -> bool:
        """Whether it is one of several for the same step."""
        return self._reward.limits.per_prompt

    def cancel(self) -> None:
        """Give up a call that nobody waits for any more."""
        self._result.cancel()

    def _arguments(self) -> dict[str, Any]:
        """Make everything anew that the function may change, and a journal for this attempt."""
        self._journal = Journal(sum(len(group.completions) for group in self.groups))
        return self._reward.select(call_arguments(self.groups, self._trainer_state, self._journal))

    def _run(self, retrying: Retrying, loop: EventLoop) -> None:
        try:
            returned = retrying(self._attempt, loop)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a user's function raises is explained by `outcome`
            self._result.set_exception(error)
        else:
            self._result.set_result(returned)

    def _attempt(self, loop: EventLoop) -> Any:
        arguments = self._arguments()
        self.attempts += 1
        started = time.perf_counter()
        try:
            returned = self._reward.function(**arguments)
            if inspect.isawaitable(returned):  # a plain function that passes a coroutine on
                returned = loop.submit(_awaited(returned)).result()
        finally:
            self.seconds += time.perf_counter() - started
        return returned

    async def _attempt_async(self) -> Any:
        async with self._reward.throttle():
            arguments = self._arguments()
            self.attempts += 1
            started = time.perf_counter()
            try:
                async with asyncio.timeout(self._reward.limits.timeout) as limit:
                    returned = await self._reward.function(**arguments)
            except TimeoutError as error:
                if not limit.expired():  # the function's own
                    raise
                raise TimedOutError(f"took longer than {self._reward.limits.timeout:g} s and was cancelled") from error
            except SystemExit as error:  # it would end the event loop, and with it the rewards that are still running
                raise RuntimeError(f"sys.exit({error.code!r})") from error
            finally:
                self.seconds += time.perf_counter() - started
        if isinstance(returned, Answer):
            self._journal.take(returned.columns, returned.metrics)
            return returned.returned
        return returned


def raised(name: str, error: BaseException, where: str = "") -> RewardError:
    """Explain an exception of a reward function.

    Args:
        name: The reward function's.
        error: What it raised, or what became of its process.
        where: The row, such as ` for prompt 0:3, completion 1`, if known.
    """
    if isinstance(error, LostCallError):
        hint = "its limits are `timeout` and `memory_limit` beside its `path`; `rewards.on_error: drop` leaves such prompts out of the step"
        return RewardError(f"reward function {name!r} {error}{where}", hint=hint)
    text = one_line(str(error))
    detail = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return RewardError(
        f"reward function {name!r} raised {text if isinstance(error, ReportedError) else detail}{where}",
        hint="--debug shows the traceback; `rewards.on_error: drop` leaves such prompts out of the step",
    )


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
