"""A rollout engine that is many: each samples its part of the prompts, and all processes get all completions."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.messages import packed, unpacked
from grpo_cli.errors import TrainingError
from grpo_cli.rollout.engine import EngineLostError, OnGroup, RevivableEngine, RolloutEngine
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt, Sampling, SyncReport

T = TypeVar("T")


class SpreadRollouts:
    """The engines of all processes, as one.

    Args:
        engine: This process's, or its part of one; None: the main process's samples everything (a server, which one process talks to).
        engines: How many there are. Each is in an equal number of neighbouring processes, which ask it for the same; the first of them
            tells what it sampled.
        processes: The processes of this run.
        together: Whether weights come only if all processes go through them.

    Attributes:
        weight_copies: Of all engines together; all of them have as many as the main process's.
    """

    def __init__(
        self, engine: RolloutEngine | None, *, engines: int, processes: Processes, together: bool = False
    ) -> None:
        own = 0 if engine is None else engine.weight_copies
        self.weight_copies = engines * int(processes.from_main(str(own).encode()))
        self._engine = engine
        self._engines = engines
        self._processes = processes
        self._led = together and engines == 1 and processes.count > 1
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
        """See `RolloutEngine`. The randomness of a completion does not depend on the process that samples it."""
        # Before they sample: those that share an engine would wait for each other for ever if they asked it for different things.
        self._processes.check_same(_digest(prompts, sampling, num_generations, seed_key), "prompts")
        engines, members = self._engines, self._processes.count // self._engines
        engine, member = divmod(self._processes.rank, members)
        part = prompts[engine::engines]
        mine = self._all_or_none(
            lambda own: own.generate(
                part, sampling, num_generations=num_generations, seed_key=seed_key, on_group=on_group
            )
        )
        messages = self._processes.gather(_message([one.completions for one in mine or ()] if member == 0 else []))
        told = [_completions(message) for message in messages[::members]]
        return [
            Group(prompt=prompt, completions=told[number % engines][number // engines])
            for number, prompt in enumerate(prompts)
        ]

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
        told = self._processes.gather(json.dumps(None if failure is None else [failure.message, failure.hint]).encode())
        for message, hint in filter(None, map(json.loads, told)):
            raise failure or kind(message, hint=hint)
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


def _digest(prompts: Sequence[Prompt], *settings: Any) -> str:
    images = [[hashlib.sha256(image).hexdigest() for image in prompt.images] for prompt in prompts]
    asked = [[(prompt.uid, prompt.ids) for prompt in prompts], images, *settings]
    return hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()


def _message(groups: Sequence[Sequence[Completion]]) -> bytes:
    flat = [completion for group in groups for completion in group]
    told = {
        "sizes": [len(group) for group in groups],
        "lengths": [len(one.ids) for one in flat],
        "texts": [one.text for one in flat],
        "finish_reasons": [one.finish_reason.value for one in flat],
        "policy_versions": [one.policy_version for one in flat],
    }
    tensors = {
        "ids": torch.tensor([token for one in flat for token in one.ids], dtype=torch.int64),
        "logps": torch.cat([one.logps for one in flat]) if flat else torch.empty(0),
    }
    return packed(tensors, told)


def _completions(message: bytes) -> list[tuple[Completion, ...]]:
    tensors, told = unpacked(message)
    ids = iter(tensors["ids"].tolist())
    logps = torch.split(tensors["logps"], told["lengths"])
    rest = zip(logps, told["texts"], told["finish_reasons"], told["policy_versions"], strict=True)
    return [
        tuple(
            Completion(
                index=index,
                ids=tuple(islice(ids, len(values))),
                logps=values,
                text=text,
                finish_reason=FinishReason(reason),
                policy_version=PolicyVersion(version),
            )
            for index, (values, text, reason, version) in zip(range(size), rest, strict=False)
        )
        for size in told["sizes"]
    ]
