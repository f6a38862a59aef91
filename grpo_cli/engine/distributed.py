"""Accelerate, and nothing of it anywhere else but its launcher: processes, devices, precision, and what processes tell each other."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from accelerate import Accelerator, DistributedType
from accelerate.utils import AutocastKwargs
from torch import Tensor, nn

from grpo_cli.errors import LostProcessError, TrainingError
from grpo_cli.metrics import Metrics, from_plain, merge, to_plain
from grpo_cli.sharding import keep_deepspeed_quiet

PATIENCE = timedelta(days=7)
"""How long a process waits for another that is alive: rewards may be slow. One that has died ends the waiting at once."""

ASSEMBLY = timedelta(seconds=30)
"""How long a process that stops waits for the others to do so, too."""

PlacedModule = TypeVar("PlacedModule", bound=nn.Module)

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
        keep_deepspeed_quiet()
        # Without `cpu=True` Accelerate would let processes without accelerators train each on its own, and say nothing.
        self._accelerator = Accelerator(
            mixed_precision="bf16" if bf16 else "no", cpu=on_cpu, kwargs_handlers=[AutocastKwargs(cache_enabled=False)]
        )
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
                hint="launch them without DeepSpeed and FSDP: the recipe asks for them (distributed.strategy)",
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

    def form_group(self) -> None:
        """Let a single process be a group, too, for libraries that want one."""
        if not torch.distributed.is_initialized():
            backend = "gloo" if self.device.type == "cpu" else None
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)

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

    def place(self, policy: PlacedModule, *, moves: bool = True) -> PlacedModule:
        """Let a model compute in this run's precision, and move it to this process's device unless it is to stay where it is."""
        placed: PlacedModule = self._accelerator.prepare_model(policy, device_placement=moves, evaluation_mode=True)
        return placed

    @contextmanager
    def autocast(self, *, keeps_weights: bool = False) -> Iterator[None]:
        """Compute in this run's precision, for models that are called without their wrapper.

        Args:
            keeps_weights: Whether rounded weights are kept to the end, which many short calls gain from. A call with a backward must not:
                a layer that is computed again would round them again, and checkpointing takes that for another computation.
        """
        with self._accelerator.autocast(AutocastKwargs(cache_enabled=keeps_weights)):
            yield

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

    def sum_on_device(self, values: Tensor) -> None:
        """Add up tensors of one shape where they are, in place.

        Args:
            values: On this process's device, contiguous.
        """
        if self.count > 1:
            self._exchange(torch.distributed.all_reduce, values)

    def least(self, number: int) -> int:
        """Give the smallest of the processes' numbers."""
        if self.count == 1:
            return number
        value = torch.tensor([number])
        self._exchange(torch.distributed.all_reduce, value, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return int(value.item())

    def most(self, number: int) -> int:
        """Give the largest of the processes' numbers."""
        return -self.least(-number)

    def all_come(self) -> bool:
        """Tell whether all processes make this call, within `ASSEMBLY`. After an answer of no, they exchange nothing any more."""
        if self.count == 1:
            return True
        try:
            torch.distributed.monitored_barrier(self._group, timeout=ASSEMBLY)
        except RuntimeError:
            return False
        return True

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
        # Each adds its own to zeros. `all_gather` would have every message be as long as the longest, and often only one is long.
        joined = torch.zeros(sum(lengths), dtype=torch.uint8)
        start = sum(lengths[: self.rank])
        joined[start : start + len(message)] = _bytes_tensor(message)
        everyones = torch.split(self.sum(joined), lengths)
        return [one.numpy().tobytes() for one in everyones]

    def from_main(self, message: bytes | None) -> bytes:
        """Give the main process's message; what the others have is not looked at."""
        if self.count == 1:
            return message or b""
        own = (message or b"") if self.is_main else b""
        length = torch.tensor([len(own)])
        self._exchange(torch.distributed.broadcast, length, src=0, group=self._group)
        told = _bytes_tensor(own) if self.is_main else torch.zeros(int(length.item()), dtype=torch.uint8)
        self._exchange(torch.distributed.broadcast, told, src=0, group=self._group)
        return told.numpy().tobytes()

    def _exchange(self, collective: Any, *arguments: Any, **options: Any) -> None:
        """Run a collective, in which a process that has ended shows as an error of the transport."""
        try:
            collective(*arguments, **options)
        except RuntimeError as error:
            raise LostProcessError.shown_by(error) from error


@contextmanager
def telling_of_lost_processes() -> Iterator[None]:
    """Run code in which libraries make exchanges of their own.

    Raises:
        LostProcessError: If one of them shows that another process has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
            raise LostProcessError.shown_by(error) from error
        raise


def _one_hot(index: int, value: int, length: int) -> Tensor:
    hot = torch.zeros(length, dtype=torch.int64)
    hot[index] = value
    return hot


def _bytes_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
