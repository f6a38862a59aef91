"""Accelerate, and nothing of it anywhere else: devices, wrapping, backward, clipping, reduction, export of weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from grpo_cli.errors import TrainingError


class Processes:
    """The processes of this run, seen from one of them.

    Args:
        bf16: Compute in bfloat16 under autocast.

    Raises:
        TrainingError: If there is more than one.
    """

    def __init__(self, *, bf16: bool) -> None:
        self._accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no")
        if self._accelerator.num_processes > 1:
            raise TrainingError(
                f"{self._accelerator.num_processes} processes were launched, but training runs on one process so far",
                hint="start `grpo train` itself, without accelerate launch, torchrun or srun -n",
            )

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self._accelerator.device
        return device

    def prepare(self, policy: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Move the policy to its device and wrap both for this run's precision and parallelism."""
        prepared: tuple[nn.Module, Optimizer] = self._accelerator.prepare(policy, optimizer)
        return prepared

    def prepare_frozen(self, policy: nn.Module) -> nn.Module:
        """Move a model that is never trained to its device, in this run's precision."""
        prepared: nn.Module = self._accelerator.prepare_model(policy, evaluation_mode=True)
        return prepared

    def unwrap(self, policy: nn.Module) -> Any:
        """Give the policy without wrappers."""
        return self._accelerator.unwrap_model(policy)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in this run's precision, for models that are called without their wrapper."""
        with self._accelerator.autocast():
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradient to the parameters."""
        self._accelerator.backward(loss)

    def clip_gradient(self, policy: nn.Module, max_norm: float) -> float:
        """Clip the gradient and give its norm from before; with `max_norm` 0 only measure it."""
        norm = self._accelerator.clip_grad_norm_(policy.parameters(), max_norm or float("inf"))
        return float(norm)

    def named_weights(self, policy: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Stream the weights of the unwrapped model under their names there; it can be iterated again, and gives what they are then."""
        return NamedWeights(self.unwrap(policy).model)


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """What a model's checkpoint would hold, but for what is tied: that comes once.

    Attributes:
        model: The live model.
    """

    model: nn.Module

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()
        saved = self.model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in saved)
