"""Free memory against limits that are really set, and control groups as the kernel writes them."""

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from grpo_cli import device_memory
from grpo_cli.device_memory import free_memory, is_out_of_memory, total_memory

CPU = torch.device("cpu")
MIB = 2**20


def test_a_cpu_has_what_the_machine_has_unless_less_is_allowed() -> None:
    free, total = free_memory(CPU), total_memory(CPU)
    assert free is not None
    assert total is not None
    assert 0 < free < total <= psutil.virtual_memory().total
    assert free_memory(torch.device("mps")) is total_memory(torch.device("mps")) is None


def test_what_is_free_under_an_address_space_limit_can_be_allocated_and_no_more() -> None:
    """In a process of its own: the limit stays."""
    script = f"""
import resource, torch
from grpo_cli.device_memory import free_memory, is_out_of_memory, total_memory
limit = 3 * 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
free = free_memory(torch.device("cpu"))
assert 100 * {MIB} < free < limit == total_memory(torch.device("cpu")), free
held = torch.empty(free - 32 * {MIB}, dtype=torch.uint8)
assert free_memory(torch.device("cpu")) < 64 * {MIB}
for allocate in (torch.empty, bytearray):
    try:
        allocate(free)
    except Exception as error:
        assert is_out_of_memory(error), error
    else:
        raise AssertionError(allocate)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def control_groups(
    monkeypatch: pytest.MonkeyPatch, folder: Path, memberships: str, files: dict[str, int | str]
) -> None:
    (folder / "memberships").write_text(memberships)
    for name, content in files.items():
        path = folder / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    monkeypatch.setattr(device_memory, "MEMBERSHIPS", folder / "memberships")
    monkeypatch.setattr(device_memory, "CONTROL_GROUPS", folder / "mount")


@pytest.mark.parametrize("limited", ["job/step", "job", "."])
def test_a_group_of_version_2_is_limited_by_itself_and_all_above(
    limited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[str, int | str] = {f"{group}/memory.max": "max" for group in ("job/step", "job", ".")}
    files |= {
        f"{limited}/memory.max": 200 * MIB,
        f"{limited}/memory.current": 120 * MIB,
        f"{limited}/memory.stat": f"anon {90 * MIB}\ninactive_file {30 * MIB}",
    }
    control_groups(monkeypatch, tmp_path, "0::/job/step\n", files)
    assert total_memory(CPU) == 200 * MIB
    assert free_memory(CPU) == 110 * MIB


def test_a_group_of_version_1_that_is_not_mounted_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: the name is the host's, the mount is the group."""
    files: dict[str, int | str] = {
        "memory/memory.limit_in_bytes": 300 * MIB,
        "memory/memory.usage_in_bytes": 310 * MIB,
        "memory/memory.stat": f"cache {90 * MIB}\ninactive_file 1\ntotal_inactive_file {60 * MIB}",
    }
    control_groups(monkeypatch, tmp_path, "5:cpu,cpuacct:/\n4:hugetlb,memory:/docker/0a1b\n0::/\n", files)
    assert total_memory(CPU) == 300 * MIB
    assert free_memory(CPU) == 50 * MIB


def test_without_limits_or_control_groups_the_machine_is_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlimited = 9223372036854771712  # what the kernel writes for "none"
    files: dict[str, int | str] = {
        "memory/memory.limit_in_bytes": unlimited,
        "memory/memory.usage_in_bytes": 5,
        "memory/memory.stat": "cache 3",
    }
    control_groups(monkeypatch, tmp_path, "4:memory:/\n", files)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert total_memory(CPU) == psutil.virtual_memory().total
    (tmp_path / "memberships").unlink()
    assert total_memory(CPU) == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (
            torch.distributed.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
            ),
            True,
        ),
        (
            torch.distributed.DistBackendError(
                "NCCL error: ncclRemoteError: A call failed possibly due to a network error"
            ),
            False,
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_that_are_about_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
