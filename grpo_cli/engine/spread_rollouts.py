"""The rollout engines of all processes: each samples its part of the prompts, and all fail together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from grpo_cli.engine.collecting import prompt_checksum
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.division import Division
from grpo_cli.errors import TrainingError
from grpo_cli.rollout.engine import EngineLostError, OnGroup, RevivableEngine, RolloutEngine
from grpo_cli.types import Group, PolicyVersion, Prompt, Sampling, SyncReport

T = TypeVar("T")


class SpreadRollouts:
    """This process's engine among those of all processes.

    Args:
        engine: This process's, or its part of one; None: the main process's samples everything (a server, which one process talks to).
        division: Who samples what.
        processes: The processes of this run.
        together: Whether weights come only if all processes go through them.

    Attributes:
        weight_copies: Of all engines together; all of them have as many as the main process's.
    """

    def __init__(
        self, engine: RolloutEngine | None, *, division: Division, processes: Processes, together: bool = False
    ) -> None:
        own = 0 if engine is None else engine.weight_copies
        self.weight_copies = division.engines * int(processes.from_main(str(own).encode()))
        self._engine = engine
        self._members = division.members
        self._processes = processes
        self._led = together and division.engines == 1 and processes.count > 1
        """Whether the other processes go through the weights whenever the main one does."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        seed_key: tuple[int | str, ...],
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """See `RolloutEngine`. The prompts are this process's part, as a `Division` says; all processes call at once."""
        self._processes.check_same([sampling, num_generations, seed_key], "ways to sample")
        # Before they sample: those that share an engine would wait for each other for ever if they asked it for different things.
        self._processes.check_same([prompt_checksum(one) for one in prompts], "prompts", among=self._members)
        groups = self._all_or_none(
            lambda own: own.generate(
                prompts, sampling, num_generations=num_generations, seed_key=seed_key, on_group=on_group
            )
        )
        return groups or []

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> SyncReport:
        """Give this process's engine the weights; what it took is the main process's to tell."""
        if self._led and self._engine is None:
            while self._processes.from_main(None) == _AGAIN:
                for _ in named_weights:
                    pass
        weights = LedWeights(named_weights, self._processes) if self._led else named_weights

        def call(own: RolloutEngine) -> SyncReport:
            try:
                return own.sync(weights, version)
            finally:
                if self._led:
                    self._processes.from_main(_ENOUGH)

        report = self._all_or_none(call)
        return SyncReport(version=version, bytes=0) if report is None else report

    def revive(self, lost: EngineLostError) -> None:
        """Have the engine that was lost started again or waited for, by the process that has it. See `RevivableEngine`.

        Raises:
            TrainingError: In every process, if it does not come back: it may take all of them to save what was trained.
        """

        def call(own: RolloutEngine) -> None:
            if not isinstance(own, RevivableEngine):
                raise lost
            own.revive(lost)

        self._all_or_none(call, kind=TrainingError)

    def rest(self) -> None:
        """Let this process's engine rest."""
        if self._engine is not None:
            self._engine.rest()

    def close(self) -> None:
        """Close this process's engine."""
        if self._engine is not None:
            self._engine.close()

    def _all_or_none(
        self, call: Callable[[RolloutEngine], T], *, kind: type[TrainingError] = EngineLostError
    ) -> T | None:
        """Have every process's engine do something, if it has one. All come to know if one failed, so that all do the same about it.

        Raises:
            TrainingError: In every process, of a kind, if one raised it.
        """
        result, failure = None, None
        try:
            if self._engine is not None:
                result = call(self._engine)
        except kind as error:
            failure = error
        self._processes.raise_together(failure, kind)
        return result


_AGAIN, _ENOUGH = b"again", b"enough"


@dataclass(frozen=True, slots=True)
class LedWeights:
    """Weights that all processes go through to the end whenever the main one begins to, also if it stops on the way."""

    named: Iterable[tuple[str, Tensor]]
    processes: Processes

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.processes.from_main(_AGAIN)
        remaining = iter(self.named)
        try:
            for one in remaining:  # noqa: UP028  `yield from` would hand the end of this generator on to it
                yield one
        finally:
            for _ in remaining:
                pass
