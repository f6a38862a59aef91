"""Runs short programs in confined processes, for tests of what confines them."""

import json
import textwrap

from rewards.confinement.layers import Layer
from rewards.confinement.limits import Limits
from rewards.confinement.process import End, Finished
from rewards.confinement.sandbox import Sandbox

LIMITS = Limits(max_memory_bytes=512 << 20, max_output_bytes=1 << 16, max_disk_bytes=1 << 20)
PROGRAM = "rewards.programs.program"
CONFINING = [layer for layer in Layer if layer is not Layer.LIMITS]


def run(sandbox: Sandbox, source: str, *, text: bytes = b"", seconds: float = 10.0) -> Finished:
    return sandbox.run(PROGRAM, {"source": textwrap.dedent(source)}, text=text, seconds=seconds)


def said(sandbox: Sandbox, source: str, *, text: bytes = b"") -> list[str]:
    """What a program says that ends well."""
    finished = run(sandbox, source, text=text)
    assert (finished.end, finished.code, finished.errors) == (End.EXIT, 0, b"")
    return finished.output.decode().splitlines()


REFUSALS = {
    "PermissionError",
    "FileNotFoundError",
    "ProcessLookupError",
    "OSError",
    "BlockingIOError",
    "gaierror",
    "failed",
}


def assert_refused(sandbox: Sandbox, attempts: list[str]) -> None:
    """Every expression raises an error of the operating system."""
    source = """
        import ctypes, fcntl, json, os, resource, shutil, signal, socket, subprocess, sys
        system_call = ctypes.CDLL(None, use_errno=True).syscall
        class failed(Exception):
            pass
        def checked(result):
            if result != 0:
                raise failed
        for attempt in json.loads(sys.stdin.read()):
            try:
                eval(attempt)
            except Exception as error:
                print(type(error).__name__)
            else:
                print("succeeded")
    """
    outcomes = said(sandbox, source, text=json.dumps(attempts).encode())
    assert len(outcomes) == len(attempts)
    assert {
        attempt: outcome for attempt, outcome in zip(attempts, outcomes, strict=True) if outcome not in REFUSALS
    } == {}
