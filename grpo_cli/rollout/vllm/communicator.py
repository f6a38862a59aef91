"""How the parts of an engine on CPUs exchange what they compute. Imports vLLM: for processes where vLLM runs only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.platforms import current_platform


class GlooCommunicator(CpuCommunicator):  # type: ignore[misc]  # vLLM has no types here
    """Exchanges by gloo, in which a process that has ended shows as an error.

    vLLM's own way on CPUs, where its kernels have it (on x86 those for AVX-512), leads through shared memory. There a process waits for
    ever for one that has ended, and hears no signal meanwhile. And the memory has the same name in every run that a launcher starts: a
    second run on the machine fails, as does one after a run that was killed.

    Args:
        unique_name: Of the group.
        **group: As vLLM has it.
    """

    def __init__(self, *, unique_name: str = "", **group: Any) -> None:
        # vLLM goes by the name.
        name = f"gloo-{unique_name}" if unique_name.startswith(("tp", "pp")) else unique_name
        super().__init__(unique_name=name, **group)


@contextmanager
def exchange_by_gloo() -> Iterator[None]:
    """Let engines that are made inside exchange by gloo, if they are on CPUs."""
    if not current_platform.is_cpu():
        yield
        return
    name = f"{GlooCommunicator.__module__}.{GlooCommunicator.__qualname__}"
    current_platform.get_device_communicator_cls = lambda: name
    try:
        yield
    finally:
        del current_platform.get_device_communicator_cls
