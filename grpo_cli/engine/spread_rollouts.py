"""A rollout engine that is many: every process samples its part of the prompts, and all get all completions."""

import hashlib
import json
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.messages import packed, unpacked
from grpo_cli.rollout.engine import RolloutEngine
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt, Sampling, SyncReport


class SpreadRollouts:
    """The engines of all processes, as one.

    Args:
        engine: This process's; None: another process's samples everything (a server, which one process talks to).
        alone: Whether the main process's engine samples everything.
        processes: The processes of this run.

    Attributes:
        weight_copies: As many as the main process's engine has.
    """

    def __init__(self, engine: RolloutEngine | None, *, alone: bool, processes: Processes) -> None:
        own = 0 if engine is None else engine.weight_copies
        self.weight_copies = int(processes.from_main(str(own).encode()))
        self._engine = engine
        self._alone = alone
        self._processes = processes

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_generations: int, seed_key: tuple[int | str, ...]
    ) -> list[Group]:
        """See `RolloutEngine`. The randomness of a completion does not depend on the process that samples it."""
        parts = 1 if self._alone else self._processes.count
        rank = self._processes.rank
        mine: list[Group] = []
        if self._engine is not None:
            mine = self._engine.generate(
                prompts[rank::parts], sampling, num_generations=num_generations, seed_key=seed_key
            )
        self._processes.check_same(_digest(prompts), "prompts")
        told = [
            _completions(message) for message in self._processes.gather(_message([one.completions for one in mine]))
        ]
        return [
            Group(prompt=prompt, completions=told[number % parts][number // parts])
            for number, prompt in enumerate(prompts)
        ]

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> SyncReport:
        """Give this process's engine the weights; what it took is the main process's to tell."""
        if self._engine is None:
            return SyncReport(version=version, bytes=0)
        return self._engine.sync(named_weights, version)

    def rest(self) -> None:
        """Let this process's engine rest."""
        if self._engine is not None:
            self._engine.rest()

    def close(self) -> None:
        """Close this process's engine."""
        if self._engine is not None:
            self._engine.close()


def _digest(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256(json.dumps([prompt.ids for prompt in prompts]).encode()).hexdigest()


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
    ids, logps = (torch.split(tensors[name], told["lengths"]) for name in ("ids", "logps"))
    rest = zip(ids, logps, told["texts"], told["finish_reasons"], told["policy_versions"], strict=True)
    return [
        tuple(
            Completion(
                index=index,
                ids=tuple(tokens.tolist()),
                logps=values,
                text=text,
                finish_reason=FinishReason(reason),
                policy_version=PolicyVersion(version),
            )
            for index, (tokens, values, text, reason, version) in zip(range(size), rest, strict=False)
        )
        for size in told["sizes"]
    ]
