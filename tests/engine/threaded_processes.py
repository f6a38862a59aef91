"""Processes of a run that are threads of one process: what they tell each other goes through memory."""

import importlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar, cast

import pytest
import torch
from torch import Tensor

from grpo_cli.engine.distributed import Number, Processes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Memory:
    """What a number of threads share."""

    count: int
    summands: dict[int, Tensor] = field(default_factory=dict)
    barrier: threading.Barrier = field(init=False)
    mail: dict[tuple[int, int], SimpleQueue[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        pairs = [(sender, receiver) for sender in range(self.count) for receiver in range(self.count)]
        object.__setattr__(self, "barrier", threading.Barrier(self.count))
        object.__setattr__(self, "mail", {pair: SimpleQueue() for pair in pairs})


class ThreadedProcesses(Processes):
    """The processes, seen from one of the threads. Only the transport is another."""

    def __init__(self, rank: int, memory: Memory) -> None:
        self.rank, self.count, self._memory = rank, memory.count, memory

    def sum(self, values: Tensor) -> Tensor:
        """Add up in the order of ranks."""
        self._memory.summands[self.rank] = values.clone()
        self._memory.barrier.wait()
        values.zero_()
        for rank in range(self.count):
            values += self._memory.summands[rank]
        self._memory.barrier.wait()
        return values

    def least(self, number: Number) -> Number:
        """Give the smallest of the processes' numbers."""
        return cast("Number", self.everyones(torch.tensor([number])).min().item())

    def rows_to_main(self, row: Tensor, width: int) -> Tensor | None:
        """Give the main process the rows of all."""
        whole = row.new_zeros(self.count, width)
        whole[self.rank] = row
        self.sum(whole)
        return whole if self.is_main else None

    def row_from_main(self, rows: Tensor | None, width: int) -> Tensor:
        """Give each process its row of the main one's matrix."""
        whole = torch.zeros(self.count, width) if rows is None else rows.clone()
        return self.sum(whole)[self.rank]

    def from_main(self, message: bytes | None) -> bytes:
        """Give the main process's message."""
        return self.gather(message or b"" if self.is_main else b"")[0]

    @property
    def device(self) -> torch.device:
        """The processor."""
        return torch.device("cpu")

    def _pass(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        for rank, one in out.items():
            if one.numel():
                self._memory.mail[self.rank, rank].put(one)
        for rank, one in into.items():
            if one.numel():
                one.copy_(self._memory.mail[rank, self.rank].get(timeout=60))


def in_threads(count: int, work: Callable[[ThreadedProcesses], T]) -> list[T]:
    """Let every process of so many do something at once, and give what each has made of it, by rank.

    If one fails, the others wait for it no longer, and its error is raised.
    """
    memory = Memory(count)

    def work_of(rank: int) -> T:
        try:
            return work(ThreadedProcesses(rank, memory))
        except BaseException:
            memory.barrier.abort()
            raise

    lock, forget = threading.Lock(), importlib.invalidate_caches

    def forget_alone() -> None:
        """Python's own fails if two threads forget the same place at once."""
        with lock:
            forget()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(count) as pool:
        patch.setattr(importlib, "invalidate_caches", forget_alone)
        futures = [pool.submit(work_of, rank) for rank in range(count)]
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
