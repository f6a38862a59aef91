"""The reference model of the KL term: frozen, or following the policy from afar."""

import torch
from torch import nn

from grpo_cli.policy.forward import PolicyModel


class ReferenceModel:
    """A model that is never trained, and moves only by mixing.

    Args:
        policy: The reference; its parameters no longer take gradients.
        mixup_alpha: Share of the policy in a mix.
        sync_steps: Steps between two mixes; 0: it never moves.
    """

    def __init__(self, policy: PolicyModel, *, mixup_alpha: float = 1.0, sync_steps: int = 0) -> None:
        self.policy = policy.requires_grad_(requires_grad=False)
        self._mixup_alpha = mixup_alpha
        self._sync_steps = sync_steps

    @property
    def moves(self) -> bool:
        """Whether its weights are part of a run's state."""
        return self._sync_steps > 0

    @torch.no_grad()
    def mix_if_due(self, policy: nn.Module, step: int) -> None:
        """Move towards the policy every `sync_steps` steps: reference = alpha * policy + (1 - alpha) * reference.

        The soft update of TR-DPO (Gorbatovski et al. 2024, eq. 5).
        """
        if not self.moves or step % self._sync_steps != 0:
            return
        for mine, theirs in zip(self.policy.parameters(), policy.parameters(), strict=True):
            mine.lerp_(theirs.to(mine.dtype), self._mixup_alpha)
