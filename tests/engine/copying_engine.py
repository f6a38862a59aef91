"""A rollout engine that samples from a copy of the weights, as vLLM does, and can lie about which."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_cli.rollout.engine import OnGroup
from grpo_cli.rollout.local.engine import LocalEngine
from grpo_cli.types import Completion, Group, PolicyVersion, Prompt, Sampling, SyncReport

NamedWeights = list[tuple[str, Tensor]]
Lie = Callable[[NamedWeights, PolicyVersion], NamedWeights | None]
"""What the engine takes instead of the weights it was given; None: nothing."""


def truth(weights: NamedWeights, version: PolicyVersion) -> NamedWeights:
    """Take what was given."""
    return weights


class CopyingEngine:
    """The local engine, over a model of its own.

    Args:
        model: Copied.
        tokenizer: The policy's.
        lie: See above.
        drift: Added to every log-probability, as a kernel that rounds otherwise might.
        **options: Of the local engine.
    """

    weight_copies = 1

    def __init__(self, model: Any, tokenizer: Any, *, lie: Lie = truth, drift: float = 0.0, **options: Any) -> None:
        self._model = deepcopy(model)
        self._engine = LocalEngine(self._model, tokenizer, **options)
        self._lie = lie
        self._drift = drift
        self.versions: list[PolicyVersion] = []
        self.calls: list[tuple[int | str, ...]] = []

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        seed_key: tuple[int | str, ...],
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        self.calls.append(seed_key)
        groups = self._engine.generate(
            prompts, sampling, num_generations=num_generations, seed_key=seed_key, on_group=on_group
        )
        return [replace(group, completions=tuple(map(self._drifted, group.completions))) for group in groups]

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> SyncReport:
        given = list(named_weights)
        taken = self._lie(given, version)
        own = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in taken or ():
                own[name].copy_(tensor)
        self.versions.append(version)
        self._engine.sync((), version)
        return SyncReport(version=version, bytes=sum(tensor.nbytes for _, tensor in given))

    def rest(self) -> None:
        self._engine.rest()

    def close(self) -> None:
        self._engine.close()

    def _drifted(self, completion: Completion) -> Completion:
        return replace(completion, logps=completion.logps + self._drift)
