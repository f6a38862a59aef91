"""The memory of a device: what there is, what is left of it, and how it says that none is left."""

import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

MEMBERSHIPS = Path("/proc/self/cgroup")
"""Names the control groups of this process."""
CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""Where control groups are mounted; version 1 has a folder for each controller."""

_ALLOCATOR_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # what cuBLAS says where its own workspace finds no room
    "Cuda failure 2 'out of memory'",  # NCCL, in all its releases
    "Cuda failure 'out of memory'",
    "could not create a primitive",  # oneDNN has no other words for it
    "std::bad_alloc",
)
"""What a plain RuntimeError of an allocator says."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that a device or the machine has no memory left for an allocation."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _ALLOCATOR_MESSAGES)


def free_memory(device: torch.device) -> int | None:
    """Count the bytes that this process can still allocate on a device.

    On a GPU that is what the driver has left and what the caching allocator holds without using it. On a CPU it is the
    machine's available memory, or less where a control group or `ulimit -v` says so; page cache counts as available. None: the
    device does not say.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type == "cpu":
        bounds = [int(psutil.virtual_memory().available), *(limit.free for limit in _process_limits())]
        return max(0, min(bounds))
    return None


def total_memory(device: torch.device) -> int | None:
    """Count the bytes that a device has, or that this process may have of them, in use or not; None: the device does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu":
        return min([int(psutil.virtual_memory().total), *(limit.total for limit in _process_limits())])
    return None


def peak_memory(device: torch.device) -> int | None:
    """Count the most bytes that this process has had on a device at one time; None: the device does not say.

    On a GPU that is what its tensors took. On a CPU it is resident memory, the interpreter and its libraries included.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "cpu":
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return None


def release_unused(device: torch.device) -> None:
    """Collect what nobody holds any more, and give what a caching allocator keeps unused back to its device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    trim_heap(device)


def trim_heap(device: torch.device) -> None:
    """Have the C library give back what it holds between allocations, if the device is a CPU and it can.

    A phase with other sizes would not reuse it.
    """
    if device.type != "cpu" or sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(frozen=True, slots=True)
class _Limit:
    """Bytes that a process may have, and those it has."""

    total: int
    used: int

    @property
    def free(self) -> int:
        return self.total - self.used


def _process_limits() -> Iterator[_Limit]:
    """Give the limits that this process has besides the machine's memory: its address space and its control groups."""
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        yield _Limit(address_space, int(psutil.Process().memory_info().vms))
    for folder in _control_groups():
        limit = _version_2(folder) or _version_1(folder)
        if limit is not None:
            yield limit


def _control_groups() -> Iterator[Path]:
    """Give the folders of this process's control groups and of the groups above, which limit it as well.

    In a container the named folder is often not mounted, while the mount itself is the container's group.
    """
    try:
        memberships = MEMBERSHIPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = CONTROL_GROUPS / "memory" if controllers else CONTROL_GROUPS
        folder = mount / path.lstrip("/")
        yield folder
        yield from (above for above in folder.parents if above.is_relative_to(mount))


def _version_2(folder: Path) -> _Limit | None:
    """Read the limit of a group of version 2; None: it has none."""
    return _limit(folder, total="memory.max", used="memory.current", cache="inactive_file")


def _version_1(folder: Path) -> _Limit | None:
    """Read the limit of a group of version 1; one without a limit has a number beyond any memory."""
    return _limit(folder, total="memory.limit_in_bytes", used="memory.usage_in_bytes", cache="total_inactive_file")


def _limit(folder: Path, *, total: str, used: str, cache: str) -> _Limit | None:
    """Read a limit and what counts against it, without file cache that the kernel would drop first."""
    try:
        most = (folder / total).read_text(encoding="utf-8").strip()
        if not most.isdecimal():  # "max"
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        counted = int((folder / used).read_text(encoding="utf-8"))
    except OSError:
        return None
    return _Limit(int(most), counted - int(statistics.get(cache, 0)))
