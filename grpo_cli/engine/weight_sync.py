"""Samples of the policy's present weights, from an engine that is given them when it is about to sample, and that may be lost."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import Tensor

from grpo_cli.engine.canary import Canary
from grpo_cli.errors import TrainingError
from grpo_cli.metrics import Metrics, Sum, merge
from grpo_cli.rollout.engine import EngineLostError, OnGroup, RevivableEngine, RolloutEngine
from grpo_cli.types import Group, PolicyVersion, Prompt, Sampling

T = TypeVar("T")

MOST_RECOVERIES = 3
"""Times that the engine may be lost before it has completed one call for samples."""


class WeightSync:
    """Gives the rollout engine the policy's weights, but not before it needs them: steps that share a generation sync once.

    An engine that is lost is revived, gets the weights anew, is checked, and does again what it was asked for. The seeds say what is
    sampled, so the samples are those that it would have given.

    Args:
        rollouts: The engine.
        weights: Names and tensors of the live policy; each iteration gives them as they are then.
        canary: Checks an engine that samples from a copy; None: there is nothing to check.
        sampling: Makes the context that the engine samples in.

    Attributes:
        rollouts: See above.
    """

    def __init__(
        self,
        rollouts: RolloutEngine,
        weights: Iterable[tuple[str, Tensor]],
        canary: Canary | None,
        *,
        sampling: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.rollouts = rollouts
        self._weights = weights
        self._canary = canary
        self._sampling = sampling
        self._version: PolicyVersion | None = None
        self._recoveries = 0
        """Since the last samples."""
        self._metrics: Metrics = {}

    def bring(self, version: PolicyVersion) -> None:
        """Make sure that the engine has the policy's present weights.

        Args:
            version: Optimizer steps behind these weights.

        Raises:
            TrainingError: If the engine does not take them, samples from others, or is lost and does not come back.
        """
        self._persist(lambda: self._bring(version))

    def sample(
        self,
        version: PolicyVersion,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        seed_key: tuple[int | str, ...],
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """Sample from the policy's present weights.

        Args:
            version: Optimizer steps behind these weights.
            prompts: See `RolloutEngine.generate`, as for the other arguments.
            sampling: See there.
            num_generations: See there.
            seed_key: See there.
            on_group: See there.

        Raises:
            TrainingError: As `bring` does, or if the engine refuses.
        """

        def call() -> list[Group]:
            self._bring(version)
            with self._sampling():
                return self.rollouts.generate(
                    prompts, sampling, num_generations=num_generations, seed_key=seed_key, on_group=on_group
                )

        groups = self._persist(call)
        self._recoveries = 0
        return groups

    def rest(self) -> None:
        """Let the engine give its memory to what comes next, until it samples again."""
        self.rollouts.rest()

    def take_metrics(self) -> Metrics:
        """Give what there is to tell of the syncs since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _bring(self, version: PolicyVersion) -> None:
        if version == self._version:
            return
        self._version = None
        report = self.rollouts.sync(self._weights, version)
        recovering = self._recoveries > 0
        checked = {} if self._canary is None else self._canary.after_sync(version, in_any_case=recovering)
        self._metrics = merge([self._metrics, {"sync/bytes": Sum(report.bytes)}, checked])
        self._version = version

    def _persist(self, call: Callable[[], T]) -> T:
        """Make a call, and again each time that the engine was lost meanwhile and has been revived."""
        while True:
            try:
                return call()
            except EngineLostError as lost:
                self._revive(lost)

    def _revive(self, lost: EngineLostError) -> None:
        self._version = None
        if not isinstance(self.rollouts, RevivableEngine):
            raise lost
        if self._recoveries == MOST_RECOVERIES:
            raise TrainingError(
                f"the rollout engine was lost {MOST_RECOVERIES + 1} times and sampled nothing in between; the last time: {lost.message}",
                hint=lost.hint,
            ) from lost
        self.rollouts.revive(lost)
        self._recoveries += 1
        self._metrics = merge([self._metrics, {"rollout/recoveries": Sum(1)}])
