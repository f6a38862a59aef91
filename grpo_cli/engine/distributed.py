"""Accelerate, and nothing of it anywhere else but its launcher: processes, devices, precision, and what processes tell each other."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed
from accelerate import Accelerator, DistributedType
from accelerate.utils import AutocastKwargs
from torch import Tensor, nn

from grpo_cli.device_memory import is_out_of_memory
from grpo_cli.engine.merging import Kinds, from_numbers, kinds_of, to_numbers, with_kinds
from grpo_cli.errors import GrpoError, LostProcessError, TrainingError
from grpo_cli.metrics import Metrics
from grpo_cli.sharding import keep_deepspeed_quiet

PATIENCE = timedelta(days=7)
"""How long a process waits for another that is alive: rewards may be slow. One that has died ends the waiting at once."""

ASSEMBLY = timedelta(seconds=30)
"""How long a process that stops waits for the others to do so, too."""

PlacedModule = TypeVar("PlacedModule", bound=nn.Module)
Number = TypeVar("Number", int, float)

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
        self._kinds: Kinds = {}
        """Of all metrics that were merged so far; the same in all processes."""
        # Connects the processes' devices, so that what this takes of a GPU's memory is gone before anything asks how much is free.
        self.sum_on_device(torch.zeros(1, device=self.device))

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
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed looks for it, which launchers set

    def check_same(self, value: Any, what: str, *, among: int | None = None) -> None:
        """Check that processes have the same of something that JSON can hold.

        Args:
            value: Of this process.
            what: It is, for the error.
            among: How many neighbours have to have the same; None: all processes.

        Raises:
            TrainingError: In every process, if one has another.
        """
        own = _digest(value)
        if among == 1 or (among is None and self.most(own) == self.least(own)):
            return
        told = self.everyones(torch.tensor([own])).view(-1, among or self.count)
        others = (told != told[:, :1]).flatten().nonzero().flatten().tolist()
        if others:
            rank = others[0]
            raise TrainingError(
                f"process {rank} has other {what} than process {rank - rank % told.shape[1]}",
                hint="all processes must be started with the same command, and a dataset's function must give all the same rows",
            )

    def raise_together(self, failure: GrpoError | None, kind: type[GrpoError]) -> None:
        """Have all processes raise an error if one has met it: the first of them.

        Args:
            failure: What happened in this process, of that kind.
            kind: What the others raise.

        Raises:
            GrpoError: That.
        """
        if not self.most(int(failure is not None)):
            return
        told = self.gather(json.dumps(None if failure is None else [failure.message, failure.hint]).encode())
        for message, hint in filter(None, map(json.loads, told)):
            raise failure or kind(message, hint=hint)

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

    def least(self, number: Number) -> Number:
        """Give the smallest of the processes' numbers, all of which are whole, or none."""
        if self.count == 1:
            return number
        value = torch.tensor([number], dtype=torch.float64 if isinstance(number, float) else torch.int64)
        self._exchange(torch.distributed.all_reduce, value, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return cast("Number", value.item())

    def most(self, number: Number) -> Number:
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
        """Merge the metrics of all processes, as sums and extremes of numbers. Names travel when they are new to a process."""
        if self.count == 1:
            return metrics
        own = kinds_of(metrics)
        if self.most(int(not own.items() <= self._kinds.items())):
            for told in self.gather(json.dumps(own).encode()):
                self._kinds = with_kinds(self._kinds, json.loads(told))
        sums, extremes = to_numbers(metrics, self._kinds)
        self._exchange(torch.distributed.all_reduce, extremes, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return from_numbers(self.sum(sums), extremes, self._kinds)

    def gather(self, message: bytes) -> list[bytes]:
        """Give the messages of all processes, by rank."""
        if self.count == 1:
            return [message]
        joined, lengths = self._behind_each_other(_bytes_tensor(message))
        return [one.numpy().tobytes() for one in torch.split(joined, lengths)]

    def everyones(self, values: Tensor) -> Tensor:
        """Put tensors of all processes behind each other, by rank.

        Args:
            values: In main memory; only the first dimension may differ from the other processes'.
        """
        if self.count == 1:
            return values
        joined, _ = self._behind_each_other(values.contiguous().view(-1).view(torch.uint8))
        return joined.view(values.dtype).view(-1, *values.shape[1:])

    def _behind_each_other(self, own: Tensor) -> tuple[Tensor, list[int]]:
        """Put the bytes of all processes behind each other; how many they are, by rank."""
        lengths = self.sum(_one_hot(self.rank, len(own), self.count))
        # Each adds its own to zeros. `all_gather` would have every message be as long as the longest, and often only one is long.
        joined = torch.zeros(int(lengths.sum()), dtype=torch.uint8)
        start = int(lengths[: self.rank].sum())
        joined[start : start + len(own)] = own
        return self.sum(joined), lengths.tolist()

    def send(self, messages: Mapping[int, bytes], *, sources: Sequence[int]) -> dict[int, bytes]:
        """Send messages to some processes, and give those that come from some.

        Args:
            messages: By the rank of who gets it; one to this process itself arrives, too.
            sources: Ranks of all who send this one something.

        Returns:
            By the rank of who sent it, in the order of `sources`.
        """
        others = {rank: one for rank, one in messages.items() if rank != self.rank}
        senders = [rank for rank in sources if rank != self.rank]
        lengths = {rank: torch.zeros(1, dtype=torch.int64) for rank in senders}
        self._pass({rank: torch.tensor([len(one)]) for rank, one in others.items()}, lengths)
        arrived = {rank: torch.zeros(int(length), dtype=torch.uint8) for rank, length in lengths.items()}
        self._pass({rank: _bytes_tensor(one) for rank, one in others.items()}, arrived)
        return {rank: messages[rank] if rank == self.rank else arrived[rank].numpy().tobytes() for rank in sources}

    def to_main(self, message: bytes) -> list[bytes]:
        """Give the main process the messages of all processes, by rank; the others get nothing."""
        everyone = range(self.count) if self.is_main else ()
        return list(self.send({0: message}, sources=everyone).values())

    def _pass(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        """Send tensors to other processes, and fill others with what those send; empty ones do not travel."""

        def travel() -> None:
            works = [
                torch.distributed.isend(one, rank, group=self._group) for rank, one in out.items() if one.numel()
            ] + [torch.distributed.irecv(one, rank, group=self._group) for rank, one in into.items() if one.numel()]
            for work in works:
                work.wait()  # type: ignore[union-attr]  # it is None for those outside of the group

        self._exchange(travel)

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

    def rows_to_main(self, row: Tensor, width: int) -> Tensor | None:
        """Give the main process a matrix of the rows of all processes, by rank; the others get nothing.

        Args:
            row: Of this process, [width], in main memory.
            width: The same in all processes.
        """
        if self.count == 1:
            return row[None]
        rows = row.new_empty(self.count, width) if self.is_main else None
        parts = None if rows is None else list(rows.unbind())
        self._exchange(torch.distributed.gather, row, parts, dst=0, group=self._group)
        return rows

    def row_from_main(self, rows: Tensor | None, width: int) -> Tensor:
        """Give each process its row of a matrix that the main one has.

        Args:
            rows: In the main process, float32 [count, width]; not looked at elsewhere.
            width: Its, which all know.
        """
        if self.count == 1:
            assert rows is not None
            return rows[0]
        own = torch.empty(width)
        parts = list(rows.unbind()) if rows is not None and self.is_main else None
        self._exchange(torch.distributed.scatter, own, parts, src=0, group=self._group)
        return own

    def _exchange(self, collective: Any, *arguments: Any, **options: Any) -> None:
        """Run a collective, in which a process that has ended shows as an error of the transport."""
        try:
            collective(*arguments, **options)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
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
        shows_it = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
        if shows_it and not is_out_of_memory(error):
            raise LostProcessError.shown_by(error) from error
        raise


def _one_hot(index: int, value: int, length: int) -> Tensor:
    hot = torch.zeros(length, dtype=torch.int64)
    hot[index] = value
    return hot


def _digest(value: Any) -> int:
    """Hash something that JSON can hold to a number that a tensor can hold, and its negative, too."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _bytes_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
