"""Weights for servers, as one transaction over all of them."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from grpo_cli.rollout.sync.buckets import Bucket
from grpo_cli.rollout.sync.transports import WeightTransport
from grpo_cli.rollout.vllm.client import ServerError, ServerStatus, VllmClient
from grpo_cli.rollout.vllm.servers import Server, none_left, states, together
from grpo_cli.types import PolicyVersion

T = TypeVar("T")


class RunAndWait(Protocol):
    """Runs a coroutine function where the servers' clients live, and waits for its result."""

    def __call__(self, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """Run it."""
        ...


class ServerReceiver:
    """Takes weights for all servers that answer. See `WeightReceiver`.

    Servers are paused from `begin` to the end of a `finish` that succeeds. One that does not answer at `begin` is left out, one that
    does is taken in, whatever it was before.

    Args:
        servers: All of them; `serving` and `failure` are set here.
        transport: Carries the bytes.
        run: Runs calls to the servers.
        on_notice: Told, in a line, of each server that is left out or comes back.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        transport: WeightTransport,
        *,
        run: RunAndWait,
        on_notice: Callable[[str], None],
    ) -> None:
        self._servers = servers
        self._transport = transport
        self._run = run
        self._on_notice = on_notice
        self._taking: list[Server] = []
        self._connected: list[str] = []
        """Instances at the other end of the transport; none after a transfer that did not finish."""
        self._complete: dict[str, ServerStatus] = {}
        """By instance what it said after an update that finished, if none has come since that did not."""
        self._have_all = False
        """Whether all servers of this update had such a one before, and have had no other since."""

    def begin(self) -> None:
        """Pause the servers, connect them, and prepare them for weights."""
        connected, self._connected = self._connected, []
        found = self._find()
        self._have_all = all(_is_as_left(status, self._complete.get(status.instance)) for status in found)
        self._all(VllmClient.pause)
        instances = [status.instance for status in found]
        if instances != connected or not self._transport.is_open:
            self._connect([status.world_size for status in found])
        self._all(VllmClient.start_weight_update)
        self._connected = instances

    def has_all_weights(self) -> bool:
        """Tell whether all servers that take this update have what the last one brought."""
        return self._have_all

    def receive(self, bucket: Bucket) -> None:
        """Send a bucket to all servers."""

        def request(info: dict[str, Any]) -> None:
            self._all(VllmClient.update_weights, info)

        self._transport.send(bucket, request)

    def finish(self, version: PolicyVersion, checksum: str) -> None:
        """Let the servers use the weights, check which they have, and let them sample."""
        self._all(VllmClient.finish_weight_update, version)
        found = self._all(VllmClient.status)
        for server, status in zip(self._taking, found, strict=True):
            if (status.policy_version, status.checksum) != (version, checksum):
                raise ServerError(
                    f"{server.client}: it has weights of version {status.policy_version} (checksum {status.checksum}) instead of "
                    f"version {version} (checksum {checksum}) that were sent"
                )
        self._complete = {status.instance: status for status in found}
        self._all(VllmClient.reset_prefix_cache)
        self._all(VllmClient.resume)
        for server, status in zip(self._taking, found, strict=True):
            server.serving = status

    def abandon(self) -> None:
        """Disconnect; the servers stay paused."""
        self._connected = []
        self._complete = {}
        self._transport.close()

    def close(self) -> None:
        """Disconnect."""
        self.abandon()

    def _find(self) -> list[ServerStatus]:
        """See which servers there are.

        Raises:
            ServerError: If there is none.
        """
        statuses = self._run(states, self._servers)
        self._taking, found = [], []
        for server, status in zip(self._servers, statuses, strict=True):
            server.serving = None
            if isinstance(status, ServerError):
                if server.failure is None:
                    self._on_notice(f"{status.message}; it is left out until the next weights")
                server.failure = status.message
                continue
            if server.failure is not None:
                self._on_notice(f"{server.client}: it is back")
                server.failure = None
            self._taking.append(server)
            found.append(status)
        if not found:
            raise none_left(self._servers)
        return found

    def _connect(self, world_sizes: Sequence[int]) -> None:
        """Connect the processes of all servers with this one, which is the first of them."""
        self._transport.close()
        world_size = 1 + sum(world_sizes)

        def request() -> None:
            offsets = [1 + sum(world_sizes[:number]) for number in range(len(world_sizes))]
            infos = [self._transport.init_info(rank_offset=offset, world_size=world_size) for offset in offsets]
            self._run(_init, self._taking, infos)

        self._transport.open(world_size=world_size, request=request)

    def _all(self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> list[T]:
        """Make a call to every server that takes weights, to all at once."""
        return self._run(_call_all, call, self._taking, arguments)


def _is_as_left(now: ServerStatus, then: ServerStatus | None) -> bool:
    """Tell whether a server has the weights that it was given; another run may have given it others."""
    return then is not None and (now.policy_version, now.checksum) == (then.policy_version, then.checksum)


async def _init(servers: Sequence[Server], infos: Sequence[dict[str, Any]]) -> None:
    await together(server.client.init_weight_transfer(info) for server, info in zip(servers, infos, strict=True))


async def _call_all(
    call: Callable[..., Coroutine[Any, Any, T]], servers: Sequence[Server], arguments: Sequence[Any]
) -> list[T]:
    return await together(call(server.client, *arguments) for server in servers)
