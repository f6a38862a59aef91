"""The whole model in every process, whose gradients are summed: data parallelism, and a single process."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.strategies.spread import spread_of
from grpo_cli.engine.strategies.strategy import MASTER
from grpo_cli.errors import TrainingError
from grpo_cli.policy.forward import PolicyModel

BUCKET_BYTES = 64 << 20
"""Gradients that are summed over processes in one message."""


class Replicas:
    """Trains the same model in every process.

    The policy is not wrapped: torch's wrapper wants the same number of backward passes from each process and a second copy of the
    gradients. `sum_gradients` does without.

    Args:
        processes: The processes of this run.
    """

    in_step = False

    def __init__(self, processes: Processes) -> None:
        self.spread = spread_of("ddp", processes.count)
        self.loads_on = processes.device
        self._processes = processes
        self._trained: list[nn.Parameter] = []
        self._policy: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._max_grad_norm = 0.0

    def building(self) -> AbstractContextManager[None]:
        """See `Strategy`."""
        return nullcontext()

    def prepare(self, policy: nn.Module, optimizer: Optimizer, *, max_grad_norm: float) -> nn.Module:
        """See `Strategy`."""
        self._policy, self._optimizer, self._max_grad_norm = policy, optimizer, max_grad_norm
        prepared = self._processes.place(policy)
        self._check_same_weights(prepared)
        return prepared

    def _check_same_weights(self, policy: nn.Module) -> None:
        if self._processes.count == 1:
            return
        sums = [float(parameter.detach().sum(dtype=torch.float64)) for parameter in policy.parameters()]
        first, *others = (
            torch.tensor(json.loads(one), dtype=torch.float64)
            for one in self._processes.gather(json.dumps(sums).encode())
        )
        for rank, theirs in enumerate(others, start=1):
            if theirs.shape != first.shape or not torch.allclose(theirs, first, equal_nan=True):
                raise TrainingError(
                    f"process {rank} has loaded other weights than process 0",
                    hint="is model.name_or_path the same folder for all of them, and is it complete?",
                )

    def prepare_frozen(self, policy: PolicyModel) -> nn.Module:
        """See `Strategy`."""
        return self._processes.place(policy)

    def backward(self, loss: Tensor) -> None:
        """See `Strategy`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def sum_gradients(self) -> None:
        """See `Strategy`. A gradient that no process has stays None, as in a single process."""
        if self._processes.count == 1:
            return
        trained = self._parameters()
        present = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        self._processes.sum(present)
        for parameter in (one for one, anywhere in zip(trained, present.tolist(), strict=True) if anywhere):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([parameter.grad for parameter in trained if parameter.grad is not None]):
            if len(bucket) == 1 and bucket[0].is_contiguous():  # a large one, of which there is no room for a copy
                self._processes.sum_on_device(bucket[0])
                continue
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            self._processes.sum_on_device(flat)
            for gradient, summed in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def apply(self) -> float:
        """See `Strategy`."""
        assert self._optimizer is not None
        norm = float(nn.utils.clip_grad_norm_(self._parameters(), self._max_grad_norm or math.inf))
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def whole(self, policy: PolicyModel) -> AbstractContextManager[None]:
        """See `Strategy`."""
        del policy
        return nullcontext()

    def own_parts(self, policy: PolicyModel) -> Iterator[Tensor]:
        """See `Strategy`."""
        return iter(policy.parameters())

    def named_weights(self, policy: PolicyModel) -> Iterable[tuple[str, Tensor]]:
        """See `Strategy`."""
        return NamedWeights(policy.model)

    def optimizer_states(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """See `Strategy`."""
        assert self._optimizer is not None
        yield from self._optimizer.state_dict()["state"].items()

    def load_optimizer_states(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """See `Strategy`."""
        assert self._optimizer is not None
        groups = self._optimizer.state_dict()["param_groups"]
        own = {number: {name: one for name, one in state.items() if name != MASTER} for number, state in states.items()}
        self._optimizer.load_state_dict({"state": own, "param_groups": groups})

    def _parameters(self) -> list[nn.Parameter]:
        """Give the trained parameters."""
        assert self._policy is not None
        return [parameter for parameter in self._policy.parameters() if parameter.requires_grad]


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Put neighbouring gradients of one precision together."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        size = sum(one.nbytes for one in bucket)
        if bucket and (bucket[0].dtype != gradient.dtype or size + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


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
        yield from saved_buffers(self.model)


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Give the buffers that a model's checkpoint holds."""
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
