"""The protocol of a rollout engine."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from grpo_cli.types import Group, PolicyVersion, Prompt, Sampling, SyncReport


class RolloutEngine(Protocol):
    """Samples completions from the newest weights it was given.

    Attributes:
        copies_weights: Whether it samples from a copy of the weights, which may be another than the trainer believes.
    """

    @property
    def copies_weights(self) -> bool:
        """See above."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_generations: int, seed_key: tuple[int | str, ...]
    ) -> list[Group]:
        """Sample `num_generations` completions for each prompt.

        The randomness of sample i of a prompt depends only on (`seed_key`, prompt.uid, i); neither on the other prompts nor on
        how the engine batches them.

        Args:
            prompts: What to complete; an empty list gives an empty list.
            sampling: How to draw.
            num_generations: Completions per prompt (G).
            seed_key: What seeds this call, such as (run seed, "train", step).

        Returns:
            One group per prompt, in the order of `prompts`.
        """
        ...

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> SyncReport:
        """Take the weights after `version` optimizer steps. An engine that shares the trainer's memory takes only the number.

        When it returns, every later completion is sampled from these weights, and nothing cached from older ones is used.

        Args:
            named_weights: Names and tensors as the model's checkpoint has them. It may be iterated again, from the beginning.
            version: Their version.

        Raises:
            TrainingError: If the engine does not have the weights; it samples nothing until a later sync succeeds.
        """
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...
