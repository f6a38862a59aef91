"""The protocol of a rollout engine, and of one that can be lost and found again."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from grpo_cli.errors import TrainingError
from grpo_cli.types import Group, PolicyVersion, Prompt, Sampling, SyncReport

OnGroup = Callable[[Group], None]
"""Takes a group that is complete."""


class EngineLostError(TrainingError):
    """What samples is gone, or has lost its weights. An engine that can be revived may sample again when it has been."""


class RolloutEngine(Protocol):
    """Samples completions from the newest weights it was given.

    Attributes:
        weight_copies: How many copies of the weights it samples from, each of which may be another than the trainer believes; 0: from
            the trainer's own. As many prompts at once are sampled by one copy each.
    """

    @property
    def weight_copies(self) -> int:
        """See above."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        seed_key: tuple[int | str, ...],
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """Sample `num_generations` completions for each prompt.

        The randomness of sample i of a prompt depends only on (`seed_key`, prompt.uid, i); neither on the other prompts nor on
        how the engine batches them.

        Args:
            prompts: What to complete; an empty list gives an empty list.
            sampling: How to draw.
            num_generations: Completions per prompt (G).
            seed_key: What seeds this call, such as (run seed, "train", step).
            on_group: Called with every group as soon as it is complete, in any order; an engine that is lost and samples again may
                call it again. Those that other processes sample are not told.

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

    def rest(self) -> None:
        """Sampling is over for now: the engine may give back memory until it is called again.

        It has the weights of the last `sync` all the same; if it gave them back, the next samples take them from the trainer anew.
        """
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


@runtime_checkable
class RevivableEngine(Protocol):
    """What a rollout engine has besides if its calls raise `EngineLostError` when what samples, elsewhere, is gone."""

    def revive(self, lost: EngineLostError) -> None:
        """Start it again or wait until somebody did, and say so. It has no weights then: `sync` comes next.

        Args:
            lost: What a call raised.

        Raises:
            TrainingError: If it does not come back.
        """
        ...
