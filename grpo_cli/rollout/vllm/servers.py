"""The servers as the trainer sees them: which of them sample from the weights that they were given."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.vllm.client import ServerError, ServerStatus, VllmClient
from grpo_cli.rollout.vllm.completion import SampledTokens

T = TypeVar("T")

_ONE_RUN = "a server samples for one run: give each its own, and continue this one with --resume"


class StaleServerError(ServerError):
    """A server answers, but has lost the weights that it was given: it was started again."""


@dataclass(kw_only=True, slots=True, eq=False)
class Server:
    """A server and what is known of it.

    Attributes:
        client: Talks to it.
        serving: What it said when it had taken the newest weights; None: it has not.
        failure: Why it was left out, and is asked for nothing; None if it was not.
    """

    client: VllmClient
    serving: ServerStatus | None = None
    failure: str | None = None

    async def complete(self, body: Mapping[str, Any]) -> list[SampledTokens]:
        """Have it complete one prompt. See `VllmClient.completions`."""
        assert self.serving is not None, "only a server that was given weights is asked"
        return await self.client.completions(body, max_bytes=self.serving.max_body_bytes)

    def serves(self) -> bool:
        """Tell whether it may be asked for completions."""
        return self.serving is not None and self.failure is None

    async def check(self) -> None:
        """Make sure that it samples from the weights that it was given.

        Raises:
            StaleServerError: If it was restarted.
            ServerError: If it does not answer.
            TrainingError: If another run uses it: to take it back would take it from that one.
        """
        given, found = self.serving, await living(self.client)
        assert given is not None, "only a server that was given weights is checked"
        if found.instance != given.instance:
            raise StaleServerError(
                f"{self.client}: it was restarted and has lost the weights of version {given.policy_version}"
            )
        if (found.policy_version, found.checksum) != (given.policy_version, given.checksum):
            raise TrainingError(
                f"{self.client}: it serves weights of version {found.policy_version} (checksum {found.checksum}) instead of "
                f"version {given.policy_version} (checksum {given.checksum}): does another run use it?",
                hint=_ONE_RUN,
            )
        if found.paused:
            raise TrainingError(f"{self.client}: it is paused: does another run use it?", hint=_ONE_RUN)


async def living(client: VllmClient) -> ServerStatus:
    """Ask a server for its state, if the engine behind it is alive; it has one as long as it runs itself.

    Raises:
        ServerError: If the engine is dead, or nothing answers.
    """
    await client.healthy()
    return await client.status()


async def states(servers: Iterable[Server]) -> list[ServerStatus | ServerError]:
    """Ask all servers at once for their states, see `living`; in order, with the failure of each that has none."""
    return await outcomes(living(server.client) for server in servers)


def leave_out(server: Server, failure: ServerError, servers: Sequence[Server]) -> str:
    """Ask a server for nothing more until it has taken new weights.

    Returns:
        What there is to tell, in a line.

    Raises:
        ServerError: If no other is left.
    """
    server.failure = failure.message
    if not any(other.serves() for other in servers):
        raise none_left(servers)
    return f"{failure.message}; it is left out until the next weights"


def none_left(servers: Sequence[Server]) -> ServerError:
    """Say why no server can be used."""
    reasons = "; ".join(server.failure for server in servers if server.failure is not None)
    return ServerError(
        reasons or "no vLLM server has the weights of this run",
        hint="what was trained is saved: start the server again and continue with --resume",
    )


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await calls at once; the first that fails ends the others.

    Returns:
        Their results in order.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def outcomes(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | ServerError]:
    """Await calls at once, however many of them fail because of their server.

    Returns:
        In order, the result of each or its failure.
    """

    async def outcome(call: Coroutine[Any, Any, T]) -> T | ServerError:
        try:
            return await call
        except ServerError as failure:
            return failure

    return await together([outcome(call) for call in calls])
