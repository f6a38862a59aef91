"""Sampling by one or more `grpo vllm-serve`.

A prompt is one request, which any server answers with the same completions: the seed says which. Each server works on as many
prompts as it can sample at once, and gets another when it has answered one, so a slow one gets fewer.
"""

import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from anyio.from_thread import start_blocking_portal
from torch import Tensor

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.engine import EngineLostError, OnGroup
from grpo_cli.rollout.sync.adapters import Adapters
from grpo_cli.rollout.sync.transaction import transfer
from grpo_cli.rollout.sync.transports import WeightTransport
from grpo_cli.rollout.vllm.client import ServerError, ServerStatus, VllmClient
from grpo_cli.rollout.vllm.completion import completed_group
from grpo_cli.rollout.vllm.fit import Needs, check_fit
from grpo_cli.rollout.vllm.limits import ADAPTER_NAME
from grpo_cli.rollout.vllm.prompt_images import ImagePrompt
from grpo_cli.rollout.vllm.sampling import first_seed, sampling_fields
from grpo_cli.rollout.vllm.server_receiver import ServerReceiver
from grpo_cli.rollout.vllm.servers import Server, leave_out, none_left, outcomes, states, together
from grpo_cli.rollout.vllm.spreading import Answer, Spreading
from grpo_cli.types import Group, PolicyVersion, Prompt, Sampling, SyncReport

T = TypeVar("T")

_POLL_SECONDS = 1.0
_WAIT_LINE_SECONDS = 10.0


class ServerEngine:
    """Samples from servers that hold a copy of the weights. See `RolloutEngine`.

    A server that fails is left out until the next sync, and its prompts go to the others. Calls raise `ServerError` when none is
    left: to wait for the servers and to sync again is then worth a try.

    Args:
        clients: One per server.
        tokenizer: Decodes completions.
        transport: Carries weights to the servers.
        bucket_bytes: Weights that travel at once.
        dtype: In which weights travel; None: as they are.
        adapters: The live policy's, which go to the servers instead of the weights that `sync` is given, if all servers take them; None: it
            has none.
        needs: What the run needs of a server.
        server_timeout: Seconds to wait for a server to come back, if all are lost.
        on_progress: Called after every prompt with the number of tokens of its completions.
        on_notice: Told, in a line, of every server that is left out or comes back.

    Attributes:
        weight_copies: Servers.
    """

    def __init__(
        self,
        clients: Sequence[VllmClient],
        tokenizer: Any,
        *,
        transport: WeightTransport,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        adapters: Adapters | None = None,
        needs: Needs | None = None,
        server_timeout: float = 600.0,
        on_progress: Callable[[int], None] | None = None,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        assert clients
        self._servers = [Server(client=client) for client in clients]
        self._tokenizer = tokenizer
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._adapters = adapters
        self._sends_adapters = self._told_of_merging = False
        self._sent_apart = False
        """Whether the last weights that all servers took were adapters beside what is below them, and not merged."""
        self._needs = Needs() if needs is None else needs
        self._server_timeout = server_timeout
        self._on_progress = on_progress or (lambda _: None)
        self._on_notice = on_notice or (lambda _: None)
        self._version: PolicyVersion | None = None
        self._held = ExitStack()
        # Requests live in a thread of their own, so that this one can leave them at any moment.
        self._portal = self._held.enter_context(start_blocking_portal(name="vllm-requests"))
        self._held.callback(self._run, self._close_clients)
        self._receiver = ServerReceiver(self._servers, transport, run=self._run, on_notice=self._on_notice)
        self._held.callback(self._receiver.close)

    @property
    def weight_copies(self) -> int:
        """One of each server; requests go to all of them in turn, as long as each has answered one."""
        return len(self._servers)

    def wait_until_ready(self, timeout: float, on_wait: Callable[[str], None] | None = None) -> None:
        """Wait for all servers.

        Args:
            timeout: Seconds to wait.
            on_wait: Told, in a line, what is being waited for: at once, when that changes, and from time to time.

        Raises:
            TrainingError: If one is not ready in time, wants another token, or is no `grpo vllm-serve`.
            ModelError: If one serves another model, or does not take sequences as long as the run's.
        """
        self._wait(len(self._servers), timeout, on_wait)

    def revive(self, lost: EngineLostError) -> None:
        """Wait until somebody has started a server again. See `RevivableEngine`."""
        self._on_notice(
            f"{lost.message}; start it again if it has ended: the run goes on when a server answers, and waits "
            f"{self._server_timeout:g} s for that (vllm.server_timeout)"
        )
        self._wait(1, self._server_timeout, self._on_notice)

    def _wait(self, enough: int, timeout: float, on_wait: Callable[[str], None] | None) -> None:
        """Wait until servers answer, and check those that do.

        Args:
            enough: Number of servers.
            timeout: Seconds to wait.
            on_wait: See `wait_until_ready`.
        """
        begin = time.monotonic()
        told, told_at = "", begin
        while True:
            found = self._run(states, self._servers)
            failures = [one for one in found if isinstance(one, ServerError)]
            if len(found) - len(failures) >= enough:
                break
            now, failure = time.monotonic(), failures[0]
            if now - begin >= timeout:
                raise ServerError(
                    f"{failure.message}; waited {timeout:g} s (vllm.server_timeout)",
                    hint="start it with `grpo vllm-serve`, or let vllm.start do it",
                )
            if on_wait is not None and (failure.message != told or now - told_at >= _WAIT_LINE_SECONDS):
                on_wait(f"waiting for {failure.message} ({now - begin:.0f} s)")
                told, told_at = failure.message, now
            time.sleep(min(_POLL_SECONDS, timeout - (now - begin)))
        self._check_fit(found)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        seed_key: tuple[int | str, ...],
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """Sample `num_generations` completions for each prompt. See `RolloutEngine.generate`.

        Raises:
            ServerError: If no server is left that has the weights of the last sync.
            TrainingError: If a server refuses a request, is too slow for `vllm.request_timeout`, or is used by another run.
        """
        if not prompts:
            return []
        self._check_servers()
        assert self._version is not None  # a server that passed the check was given it
        bodies = [
            self._body(prompt, sampling, num_generations=num_generations, seed_key=seed_key) for prompt in prompts
        ]
        groups: dict[int, Group] = {}
        with closing(self._answers(bodies)) as answers:
            for answer in answers:
                sampled = answer.sampled * (num_generations // len(answer.sampled))  # greedy ones were sampled once
                prompt = prompts[answer.number]
                group = completed_group(prompt, sampled, tokenizer=self._tokenizer, version=self._version)
                groups[answer.number] = group
                if on_group is not None:
                    on_group(group)
                self._on_progress(sum(len(completion.ids) for completion in group.completions))
        return [groups[number] for number in range(len(prompts))]

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> SyncReport:
        """Give all servers new weights. One that does not answer is left out. See `RolloutEngine.sync`.

        Raises:
            ServerError: If it failed because a server went away meanwhile, or none is there.
            TrainingError: If servers that are there do not take the weights.
        """
        self._version = None
        for server in self._servers:
            server.serving = None
        before = self._run(states, self._servers)
        failures = [one.message for one in before if isinstance(one, ServerError)]
        if len(failures) == len(before):
            raise ServerError("; ".join(failures))
        self._sends_adapters = self._adapters is not None and self._take_adapters(before, self._adapters.rank)
        if self._adapters is not None and self._sends_adapters:
            apart = self._sent_apart
            named_weights = self._adapters.after(lambda: apart and self._receiver.has_all_weights())
        self._sent_apart = False
        try:
            report = transfer(
                self._receiver, named_weights, version, bucket_bytes=self._bucket_bytes, dtype=self._dtype
            )
        except TrainingError as error:
            lost = self._lost_since(before)
            if lost is None:
                raise
            raise ServerError(f"{lost} ({error.message})", hint=error.hint) from error
        self._version, self._sent_apart = version, self._sends_adapters
        return report

    def rest(self) -> None:
        """Do nothing: the servers' memory is theirs. See `RolloutEngine.rest`."""

    def close(self) -> None:
        """Close all connections; the servers stay."""
        self._held.close()

    def _run(self, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """Run a coroutine in the requests' thread, and drop its connections if this thread is called away."""
        future = self._portal.start_task_soon(function, *arguments)
        try:
            result: T = future.result()
        except BaseException:
            future.cancel()
            raise
        return result

    async def _close_clients(self) -> None:
        await together(server.client.aclose() for server in self._servers)

    def _take_adapters(self, found: Sequence[ServerStatus | ServerError], rank: int) -> bool:
        """Tell whether all servers that are there take adapters of a rank; say so, once, if one does not."""
        for server, status in zip(self._servers, found, strict=True):
            if isinstance(status, ServerStatus) and status.max_lora_rank < rank:
                if not self._told_of_merging:
                    takes = f"up to rank {status.max_lora_rank}" if status.max_lora_rank else "not"
                    self._on_notice(
                        f"{server.client}: it takes adapters {takes}; those of this run have rank {rank}, so it is sent all weights with "
                        "the adapters merged into them (start it with this recipe to send it the adapters alone)"
                    )
                self._told_of_merging = True
                return False
        return True

    def _lost_since(self, before: Sequence[ServerStatus | ServerError]) -> str | None:
        """Say which server went away or was restarted since `before`; None: all are as they were."""
        for server, then, now in zip(self._servers, before, self._run(states, self._servers), strict=True):
            if isinstance(then, ServerError):
                continue
            if isinstance(now, ServerError):
                return now.message
            if now.instance != then.instance:
                return f"{server.client}: it was restarted"
        return None

    def _check_fit(self, found: Sequence[ServerStatus | ServerError]) -> None:
        """Compare what the run needs with what the servers are."""
        by_instance: dict[str, Server] = {}
        for server, status in zip(self._servers, found, strict=True):
            if isinstance(status, ServerError):
                continue
            twin = by_instance.setdefault(status.instance, server)
            if twin is not server:
                raise TrainingError(
                    f"vllm.server_base_urls: {twin.client.base_url} and {server.client.base_url} are the same server"
                )
            check_fit(str(server.client), status, self._needs)

    def _body(
        self, prompt: Prompt, sampling: Sampling, *, num_generations: int, seed_key: tuple[int | str, ...]
    ) -> Mapping[str, Any]:
        """Make the request for a prompt's completions."""
        count = 1 if sampling.temperature == 0 else num_generations
        fields = sampling_fields(sampling, n=count, seed=first_seed(seed_key, prompt.uid, n=count))
        named = {"model": ADAPTER_NAME} if self._sends_adapters else {}
        if prompt.images:
            assert not self._sends_adapters, "those of a model that sees are merged"
            return {**ImagePrompt.of(prompt, self._tokenizer).request(), **fields}
        return {"prompt": list(prompt.ids), **named, **fields}

    def _answers(self, bodies: Sequence[Mapping[str, Any]]) -> Generator[Answer]:
        """Have requests answered, and give each answer as it comes."""
        reports: SimpleQueue[Answer | str | None] = SimpleQueue()
        future = self._portal.start_task_soon(Spreading(self._servers, reports.put).answer, bodies)
        future.add_done_callback(lambda _: reports.put(None))
        try:
            while (report := reports.get()) is not None:
                if isinstance(report, Answer):
                    yield report
                else:
                    self._on_notice(report)
            future.result()
        finally:
            future.cancel()  # if this thread was called away: drops the connections, so that the servers stop

    def _check_servers(self) -> None:
        """Leave out every server that does not serve the weights it was given.

        Raises:
            ServerError: If none is left.
            TrainingError: If another run uses one.
        """
        serving = [server for server in self._servers if server.serves()]
        for server, failure in zip(serving, self._run(_checks, serving), strict=True):
            if failure is not None:
                self._on_notice(leave_out(server, failure, self._servers))
        if not serving:
            raise none_left(self._servers)


async def _checks(servers: Sequence[Server]) -> list[ServerError | None]:
    return await outcomes(server.check() for server in servers)
