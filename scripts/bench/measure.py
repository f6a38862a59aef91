"""Processor time, wall time and peak memory of the parts of a step, and the machine's speed at matrix multiplication. Linux only."""

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a part of a step took.

    Attributes:
        cpu_seconds: Processor time of all threads.
        wall_seconds: Time on the clock.
        peak_bytes: Most resident memory of the whole process meanwhile.
    """

    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    peak_bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
            wall_seconds=self.wall_seconds + other.wall_seconds,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
        )


class Meter:
    """Takes the cost of a whole step and of its parts. Parts with one name add up; a part within a part counts in both."""

    def __init__(self) -> None:
        self.parts: dict[str, Cost] = {}
        self._peak = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure one part."""
        self._note_peak()
        before, self._peak = self._peak, 0
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            self._note_peak()
            cost = Cost(cpu_seconds=cpu, wall_seconds=wall, peak_bytes=self._peak)
            self.parts[name] = self.parts.get(name, Cost()) + cost
            self._peak = max(before, self._peak)

    def _note_peak(self) -> None:
        """Take the kernel's high-water mark of resident memory, and set it back to the present level."""
        self._peak = max(self._peak, _status("VmHWM"))
        CLEAR.write_text("5", encoding="ascii")


def resident_bytes() -> int:
    """Resident memory, after everything that can be given back has been."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return _status("VmRSS")


def weight_bytes(*models: torch.nn.Module) -> int:
    """Memory that the weights of some models need."""
    return sum(weight.numel() * weight.element_size() for model in models for weight in model.parameters())


def _status(name: str) -> int:
    """Read an amount of memory of this process, in bytes."""
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def multiplication_rates(size: int = 1024, repeats: int = 40) -> dict[str, dict[str, float]]:
    """Measure float32 matrix multiplication: the best of many short ones, for any of them may be interrupted.

    It is done the way a model does it, by the BLAS that PyTorch is built with, and by oneDNN: on some processors only one of them uses
    the widest vector units.

    Returns:
        By library, floating-point operations per second of `cpu` and of `wall` time.
    """
    left, right = torch.randn(size, size), torch.randn(size, size)
    rates = {"BLAS": _best_rate(left, right, repeats)}
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch has no types for it
        rates["oneDNN"] = _best_rate(left.to_mkldnn(), right.to_mkldnn(), repeats)
    return rates


def _best_rate(left: torch.Tensor, right: torch.Tensor, repeats: int) -> dict[str, float]:
    """Multiply two square matrices and give the highest rates."""
    operations = 2 * left.shape[0] ** 3
    rates = {"cpu": 0.0, "wall": 0.0}
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        linear(left, right)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        rates = {"cpu": max(rates["cpu"], operations / cpu), "wall": max(rates["wall"], operations / wall)}
    return rates
