"""The numbers of system calls against the kernel's own headers."""

import re
from pathlib import Path

import pytest

from rewards.confinement.system_calls import CONDITIONAL, DENIED

HEADERS = (
    Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/include/asm-generic/unistd.h"),  # what 64-bit ARM uses
)


@pytest.mark.parametrize("column", [0, 1], ids=["x86-64", "ARM"])
def test_numbers_are_the_kernels(column: int) -> None:
    if not HEADERS[column].is_file():
        pytest.skip("the kernel's headers are not installed")
    text = HEADERS[column].read_text(encoding="utf-8")
    known = {
        name: int(number)
        for name, number in re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", text, re.MULTILINE)
    }
    ours = {name: numbers[column] for name, numbers in (DENIED | CONDITIONAL).items() if numbers[column] is not None}
    assert ours.items() <= known.items()
    missing = {name for name, numbers in (DENIED | CONDITIONAL).items() if numbers[column] is None}
    assert not missing & known.keys()
