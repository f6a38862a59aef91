"""Accelerate, and nothing of it anywhere else but its launcher: processes, devices, wrapping, backward, clipping, reduction, export of weights."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer

from grpo_cli.errors import LostProcessError, TrainingError
from grpo_cli.metrics import Metrics, from_plain, merge, to_plain

PATIENCE = timedelta(days=7)
"""How long a process waits for another that is alive: rewards may be slow. One that has died ends the waiting at once."""

BUCKET_BYTES = 64 << 20
"""Gradients that are summed over processes in one message."""

_KINDS = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
"""What Accelerate may have made of the processes: the same model in each."""


class Processes:
    """The processes of this run, seen from one of them.

    All of them are in the same state between two steps and come to the same decisions; they share the work, and tell each other
    what came of it. With one process, every exchange is nothing.

    Args:
        bf16: Compute in bfloat16 under autocast.

    Raises:
        TrainingError: If the processes that were launched do not find each other.
    """

    def __init__(self, *, bf16: bool) -> None:
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        on_cpu = launched > 1 and not torch.accelerator.is_available()
        # Without `cpu=True` Accelerate would let processes without accelerators train each on its own, and say nothing.
        self._accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no", cpu=on_cpu)
        self.count: int = self._accelerator.num_processes
        self.rank: int = self._accelerator.process_index
        if self.count != launched:
            raise TrainingError(
                f"{launched} processes were launched (WORLD_SIZE), but Accelerate knows of {self.count}",
                hint="start them with `grpo train --nproc`, `accelerate launch` or `torchrun`",
            )
        kind = self._accelerator.distributed_type
        if kind not in _KINDS:
            raise TrainingError(
                f"the processes were launched for {kind.value}, which this version does not train with",
                hint="launch them without DeepSpeed and FSDP",
            )
        # What the processes tell each other are numbers and bytes in main memory, also where they train on GPUs.
        self._group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE) if self.count > 1 else None

    @property
    def is_main(self) -> bool:
        """Whether this is the process that talks, scores and writes."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self._accelerator.device
        return torch.device("cpu") if device.type == "cpu" else device  # Accelerate numbers it

    @property
    def sharing_memory(self) -> int:
        """How many of the processes compute in the same memory as this one."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", str(self.count))) if self.device.type == "cpu" else 1

    def prepare(self, policy: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Move the policy to its device, and fit both to this run's precision.

        The policy is not wrapped for several processes: torch's wrapper wants the same number of backward passes from each and a second
        copy of the gradients. `sum_gradients` does without.

        Raises:
            TrainingError: If the processes have not loaded the same weights.
        """
        prepared = self._place(policy)
        self._check_same_weights(prepared)
        return prepared, self._accelerator.prepare_optimizer(optimizer)

    def _check_same_weights(self, policy: nn.Module) -> None:
        if self.count == 1:
            return
        sums = [float(parameter.detach().sum(dtype=torch.float64)) for parameter in policy.parameters()]
        first, *others = (
            torch.tensor(json.loads(one), dtype=torch.float64) for one in self.gather(json.dumps(sums).encode())
        )
        for rank, theirs in enumerate(others, start=1):
            if theirs.shape != first.shape or not torch.allclose(theirs, first, equal_nan=True):
                raise TrainingError(
                    f"process {rank} has loaded other weights than process 0",
                    hint="is model.name_or_path the same folder for all of them, and is it complete?",
                )

    def check_same(self, value: Any, what: str) -> None:
        """Check that all processes have the same of something that JSON can hold.

        Raises:
            TrainingError: If one has another.
        """
        first, *others = self.gather(json.dumps(value, sort_keys=True, default=str).encode())
        for rank, theirs in enumerate(others, start=1):
            if theirs != first:
                raise TrainingError(
                    f"process {rank} has other {what} than process 0",
                    hint="all processes must be started with the same command, and a dataset's function must give all the same rows",
                )

    def prepare_frozen(self, policy: nn.Module) -> nn.Module:
        """Move a model that is never trained to its device, in this run's precision."""
        return self._place(policy)

    def _place(self, policy: nn.Module) -> nn.Module:
        placed: nn.Module = self._accelerator.prepare_model(policy, evaluation_mode=True)
        return placed

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

    def sum_gradients(self, policy: nn.Module) -> None:
        """Make every gradient the sum of all processes' gradients. One that no process has stays None, as in a single process."""
        if self.count == 1:
            return
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        present = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        self.sum(present)
        for parameter in (one for one, anywhere in zip(trained, present.tolist(), strict=True) if anywhere):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([parameter.grad for parameter in trained if parameter.grad is not None]):
            if len(bucket) == 1 and bucket[0].is_contiguous():  # a large one, of which there is no room for a copy
                self._exchange(torch.distributed.all_reduce, bucket[0])
                continue
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            self._exchange(torch.distributed.all_reduce, flat)
            for gradient, summed in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def clip_gradient(self, policy: nn.Module, max_norm: float) -> float:
        """Clip the gradient and give its norm from before; with `max_norm` 0 only measure it."""
        norm = self._accelerator.clip_grad_norm_(policy.parameters(), max_norm or float("inf"))
        return float(norm)

    def named_weights(self, policy: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Stream the weights of the unwrapped model under their names there; it can be iterated again, and gives what they are then."""
        return NamedWeights(self.unwrap(policy).model)

    def sum(self, values: Tensor) -> Tensor:
        """Add up tensors of one shape, in place.

        Args:
            values: In main memory.

        Raises:
            LostProcessError: As for every exchange, if another process has ended.
        """
        if self.count > 1:
            self._exchange(torch.distributed.all_reduce, values, group=self._group)
        return values

    def least(self, number: int) -> int:
        """Give the smallest of the processes' numbers."""
        if self.count == 1:
            return number
        value = torch.tensor([number])
        self._exchange(torch.distributed.all_reduce, value, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return int(value.item())

    def merge(self, metrics: Metrics) -> Metrics:
        """Merge the metrics of all processes."""
        if self.count == 1:
            return metrics
        told = self.gather(json.dumps(to_plain(metrics)).encode())
        return merge(from_plain(json.loads(one)) for one in told)

    def gather(self, message: bytes) -> list[bytes]:
        """Give the messages of all processes, by rank."""
        if self.count == 1:
            return [message]
        lengths = self.sum(_one_hot(self.rank, len(message), self.count)).tolist()
        longest = max(lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(message)] = _bytes_tensor(message)
        everyones = [torch.empty_like(mine) for _ in lengths]
        self._exchange(torch.distributed.all_gather, everyones, mine, group=self._group)
        return [one[:length].numpy().tobytes() for one, length in zip(everyones, lengths, strict=True)]

    def from_main(self, message: bytes | None) -> bytes:
        """Give the main process's message; the others have none."""
        return self.gather(b"" if message is None else message)[0]

    def _exchange(self, collective: Any, *arguments: Any, **options: Any) -> None:
        """Run a collective, in which a process that has ended shows as an error of the transport."""
        try:
            collective(*arguments, **options)
        except RuntimeError as error:
            raise LostProcessError.shown_by(error) from error


def _one_hot(index: int, value: int, length: int) -> Tensor:
    hot = torch.zeros(length, dtype=torch.int64)
    hot[index] = value
    return hot


def _bytes_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)


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
        saved = self.model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in saved)
