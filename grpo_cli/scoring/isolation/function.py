"""A reward function that runs in worker processes, called as if it were an `async def` here."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from grpo_cli.errors import RewardError
from grpo_cli.scoring.event_loop import EventLoop
from grpo_cli.scoring.isolation.failures import LostCallError
from grpo_cli.scoring.isolation.reply import Answer, answer_of
from grpo_cli.scoring.isolation.worker import Worker, WorkerLimits, call_message
from grpo_cli.scoring.limits import CallLimits, Throttle
from grpo_cli.scoring.reward import Reward
from grpo_cli.types import IMAGE, IMAGES


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What a worker process loads.

    Attributes:
        name: The reward's.
        path: Dotted.
        folder: The recipe's, which the path is looked up from.
        parameters: For the function, or the class's constructor.
    """

    name: str
    path: str
    folder: str
    parameters: Mapping[str, Any]


class IsolatedFunction:
    """Calls a function in processes of its own: one for each call that is made at the same time.

    A process in which a call got no answer is gone, and another one is started when it is needed. All of it happens in one event loop.

    Args:
        source: The function.
        limits: What one call may take.
    """

    def __init__(self, source: Source, limits: WorkerLimits) -> None:
        self._source = source
        self._limits = limits
        self._idle: list[Worker] = []
        # As it is now: while vLLM is at work in this process, it is another one.
        self._environment = dict(os.environ)

    async def load(self) -> dict[str, Any]:
        """Start the first process, and give what it says of the function.

        Raises:
            RewardError: If it cannot be loaded.
        """
        worker, told = await self._start()
        self._idle.append(worker)
        return told

    async def __call__(self, **arguments: Any) -> Answer:
        """Call the function; see `call`."""
        return await self.call(arguments, state=None)

    async def call(self, arguments: Mapping[str, Any], *, state: Any) -> Answer:
        """Call the function.

        Args:
            arguments: By name, `completions` among them.
            state: What an object that has one is to begin with.

        Raises:
            ReportedError: What it raised.
            LostCallError: If there is no answer.
            TypeError: If an argument cannot be sent to another process.
        """
        message = call_message(arguments, state=state)
        worker = await self._free()
        told = await worker.call(message)
        if await worker.has_too_much():
            await worker.end()
        else:
            self._idle.append(worker)
        return answer_of(told)

    async def close(self) -> None:
        """End the processes that wait; the next call starts a new one."""
        while self._idle:
            await self._idle.pop().end()

    async def _free(self) -> Worker:
        """Give a process that nobody has asked; one that ended meanwhile is cleared up."""
        while self._idle:
            worker = self._idle.pop()
            if worker.lives:
                return worker
            await worker.end()
        return (await self._start())[0]

    async def _start(self) -> tuple[Worker, dict[str, Any]]:
        worker = Worker(self._limits, self._environment)
        told = await worker.load(**asdict(self._source))
        if "refused" in told or "raised" in told:
            await worker.end()
            message, hint = told.get("refused") or (told["raised"], None)
            raise RewardError(message if "refused" in told else f"reward {self._source.name!r}: {message}", hint=hint)
        return worker, told


class StatefulFunction:
    """An isolated object with a state. The state is kept here, so that a process can be lost and a checkpoint written.

    Args:
        function: Calls it.
        state: What it has had so far, as JSON.
    """

    def __init__(self, function: IsolatedFunction, state: Any) -> None:
        self._function = function
        self._state = state

    async def __call__(self, **arguments: Any) -> Answer:
        """Call the object; see `IsolatedFunction.call`."""
        answer = await self._function.call(arguments, state=self._state)
        self._state = answer.state
        return answer

    def state_dict(self) -> Any:
        """Give the state after the last call that had an answer."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Let the next call begin with a state."""
        self._state = state

    async def close(self) -> None:
        """End the processes."""
        await self._function.close()


def refuse_several_at_once(name: str, limits: CallLimits) -> None:
    """Refuse calls at the same time of an object with a state.

    Raises:
        RewardError: If that is what limits allow.
    """
    if limits.concurrency > 1:
        raise RewardError(
            f"reward {name!r}: found `concurrency: {limits.concurrency}` for an object with a state; allowed: 1, for each call "
            "begins where the last one ended"
        )


def end_processes(rewards: Iterable[Reward]) -> None:
    """End the processes of rewards that have some."""
    for reward in rewards:
        if isinstance(reward.function, IsolatedFunction | StatefulFunction) and reward.loop is not None:
            reward.loop.cancel()
            reward.loop.submit(reward.function.close()).result()


def isolated(source: Source, *, worker: WorkerLimits, limits: CallLimits, loop: EventLoop) -> Reward:
    """Load a function in a process of its own, and make a reward of it.

    Args:
        source: The function.
        worker: What one call may take.
        limits: How calls are made.
        loop: Where they are waited for. No function of a user's runs there, so that deadlines hold.

    Raises:
        RewardError: If it cannot be loaded, or has a state and is to be called several times at once.
    """
    opened = IsolatedFunction(source, worker)
    try:
        told = loop.submit(opened.load()).result()
    except LostCallError as error:
        raise RewardError(f"reward {source.name!r} {error}") from error
    try:
        if "state" in told:
            refuse_several_at_once(source.name, limits)
    except RewardError:
        loop.submit(opened.close()).result()
        raise
    return Reward(
        name=source.name,
        function=StatefulFunction(opened, told["state"]) if "state" in told else opened,
        wanted=frozenset(told["wanted"]) | {"completions"},
        required=tuple(told["required"]),
        takes_all=told["takes_all"],
        bound=frozenset(told["bound"]),
        is_async=True,
        limits=limits,
        throttle=Throttle(limits),
        description=told["description"],
        loop=loop,
        named_only=frozenset({IMAGE, IMAGES}),
    )
