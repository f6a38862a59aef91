"""What a way to train in several processes does."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grpo_cli.engine.strategies.spread import Spread
from grpo_cli.policy.forward import PolicyModel

MASTER = "weight"
"""What a checkpoint calls the float32 weights that bfloat16 ones are rounded from."""


class Strategy(Protocol):
    """Holds the policy, moves its gradients between the processes, and applies them.

    Attributes:
        spread: What each process keeps of it.
        in_step: Whether a forward or backward of the policy is an exchange in which all processes have to take part. Then they do equally
            many, none of them can be repeated or cut off, and so it is with everything that reads whole weights.
        loads_on: The device that models are put on when they have been loaded.
    """

    spread: Spread
    in_step: bool
    loads_on: torch.device

    def building(self) -> AbstractContextManager[None]:
        """Make the context in which models are loaded."""
        ...

    def prepare(self, policy: PolicyModel, optimizer: Optimizer, *, max_grad_norm: float) -> nn.Module:
        """Take the policy and its optimizer over.

        Args:
            policy: Where `building` has put it.
            optimizer: Of its parameters.
            max_grad_norm: Clip the gradient there; 0 does not clip.

        Returns:
            What is called instead of the policy, with the same arguments and the same outcome.

        Raises:
            TrainingError: If the processes have not loaded the same weights.
            ModelError: If the policy cannot be cut.
        """
        ...

    def prepare_frozen(self, policy: PolicyModel) -> nn.Module:
        """Take a model over that is never trained, and give what is called instead."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss to that of the step. The step's gradient is the sum over all processes' losses."""
        ...

    def sum_gradients(self) -> None:
        """Exchange the step's gradients, if they have not been yet."""
        ...

    def apply(self) -> float:
        """Clip the step's gradient, let the optimizer apply it if it is finite, and clear it.

        Returns:
            The gradient's norm before clipping. If it is not finite, the weights are as before.
        """
        ...

    def whole(self, policy: PolicyModel) -> AbstractContextManager[None]:
        """Make the context in which every process has all weights of a policy, and reads them without the others."""
        ...

    def own_parts(self, policy: PolicyModel) -> Iterator[Tensor]:
        """Give the parts of a policy's parameters that this process keeps, in their order, to be changed in place."""
        ...

    def named_weights(self, policy: PolicyModel) -> Iterable[tuple[str, Tensor]]:
        """Stream whole weights of the policy's model under their names there; it can be iterated again, and gives what they are then.

        All processes iterate if `in_step`.
        """
        ...

    def optimizer_states(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Stream the optimizer's whole states, by the number of the parameter that they belong to. All processes iterate if `in_step`."""
        ...

    def load_optimizer_states(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Put the optimizer where `optimizer_states` told it was, under any strategy."""
        ...
