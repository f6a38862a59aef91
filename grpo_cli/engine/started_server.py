"""Sampling by a server that this run started: it is started again when it dies, and its log says why it did."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.engine import EngineLostError, OnGroup, RolloutEngine
from grpo_cli.rollout.vllm.supervisor import ServerProcess
from grpo_cli.types import Group, PolicyVersion, Prompt, Sampling, SyncReport


class StartedServerEngine:
    """An engine and the process behind it. See `RevivableEngine`.

    Args:
        engine: Talks to the server.
        server: Runs until it is stopped; ending it is another's task.
        server_timeout: Seconds for it to be ready in when it is started again.
        say: Told what happens to it, line by line.

    Attributes:
        weight_copies: 1.
    """

    weight_copies = 1

    def __init__(
        self, engine: RolloutEngine, server: ServerProcess, *, server_timeout: float, say: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._server = server
        self._timeout = server_timeout
        self._say = say

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        seed_key: tuple[int | str, ...],
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """Sample `num_generations` completions for each prompt. See `RolloutEngine.generate`."""
        with self._explained():
            return self._engine.generate(
                prompts, sampling, num_generations=num_generations, seed_key=seed_key, on_group=on_group
            )

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> SyncReport:
        """Give the server new weights. See `RolloutEngine.sync`."""
        with self._explained():
            return self._engine.sync(named_weights, version)

    def rest(self) -> None:
        """Pass it on. See `RolloutEngine.rest`."""
        self._engine.rest()

    def revive(self, lost: EngineLostError) -> None:
        """Start the server again, with the same arguments. See `RevivableEngine`."""
        self._say(f"{lost.message}; it is started again")
        self._server.stop()
        self._server.start()
        self._say(f"vLLM: its log so far is {self._server.earlier_log}")
        wait_for(self._server, self._timeout, self._say)

    def close(self) -> None:
        """Close the connections."""
        self._engine.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except EngineLostError as lost:
            try:
                self._server.raise_if_ended()
            except TrainingError as ended:
                raise EngineLostError(ended.message, hint=ended.hint) from lost
            raise


def wait_for(server: ServerProcess, timeout: float, say: Callable[[str], None]) -> None:
    """Wait until a server is ready.

    Args:
        server: Started just now.
        timeout: Seconds.
        say: Told, in lines, how far it is.

    Raises:
        TrainingError: If it ends before, or takes longer.
    """
    seconds = server.wait_until_ready(timeout, lambda stage, seconds: say(f"vLLM: {stage}, {seconds:.0f} s"))
    say(f"vLLM is ready after {seconds:.0f} s")
