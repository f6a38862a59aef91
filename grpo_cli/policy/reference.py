"""The reference of the KL term: a model of its own, frozen or following the policy from afar; or the policy with other adapters."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from grpo_cli.policy.forward import PolicyModel

Parts = Callable[[PolicyModel], Iterator[Tensor]]
"""Gives what this process keeps of a model's parameters, in their order."""


class Reference(Protocol):
    """What completions are compared with.

    Attributes:
        policy: Computes the log-probabilities, within `in_place`.
        prepared: What is called instead of it.
    """

    policy: PolicyModel
    prepared: nn.Module

    @property
    def moves(self) -> bool:
        """Whether its weights are part of a run's state."""
        ...

    def in_place(self) -> AbstractContextManager[None]:
        """Make the context in which `policy` is the reference."""
        ...

    def mix_if_due(self, policy: PolicyModel, step: int, *, parts: Parts) -> None:
        """Move towards the policy, if it is one that moves and it is time.

        Args:
            policy: What is trained.
            step: Optimizer steps done.
            parts: Gives what this process keeps of a model's parameters.
        """
        ...


class AdapterReference:
    """The policy with other adapters than those that are trained, or with none: no second copy of the model's weights.

    Args:
        policy: The policy.
        prepared: What is called instead of it.
        switched: Makes the context in which a model has the reference's adapters: `without_adapters` or `with_reference_adapters`.
    """

    moves = False

    def __init__(
        self, policy: PolicyModel, prepared: nn.Module, *, switched: Callable[[Any], AbstractContextManager[None]]
    ) -> None:
        self.policy = policy
        self.prepared = prepared
        self._switched = switched

    def in_place(self) -> AbstractContextManager[None]:
        """Switch the adapters meanwhile."""
        return self._switched(self.policy.model)

    def mix_if_due(self, policy: PolicyModel, step: int, *, parts: Parts) -> None:
        """Stay: all of it is frozen."""


class ReferenceModel:
    """A model that is never trained, and moves only by mixing.

    Args:
        policy: The reference; its parameters no longer take gradients.
        prepare: Makes what is called instead of it.
        mixup_alpha: Share of the policy in a mix.
        sync_steps: Steps between two mixes; 0: it never moves.
    """

    def __init__(
        self,
        policy: PolicyModel,
        *,
        prepare: Callable[[PolicyModel], nn.Module],
        mixup_alpha: float = 1.0,
        sync_steps: int = 0,
    ) -> None:
        self.policy = policy.requires_grad_(requires_grad=False)
        self.prepared = prepare(self.policy)
        self._mixup_alpha = mixup_alpha
        self._sync_steps = sync_steps

    @property
    def moves(self) -> bool:
        """Whether its weights are part of a run's state."""
        return self._sync_steps > 0

    def in_place(self) -> AbstractContextManager[None]:
        """Change nothing: it is a model of its own."""
        return nullcontext()

    @torch.no_grad()
    def mix_if_due(self, policy: PolicyModel, step: int, *, parts: Parts) -> None:
        """Move towards the policy every `sync_steps` steps: reference = alpha * policy + (1 - alpha) * reference.

        The soft update of TR-DPO (Gorbatovski et al. 2024, eq. 5).
        """
        if not self.moves or step % self._sync_steps != 0:
            return
        for mine, theirs in zip(parts(self.policy), parts(policy), strict=True):
            mine.lerp_(theirs.to(mine.dtype), self._mixup_alpha)
