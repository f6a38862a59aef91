"""The command line, in processes that are forked from one that has imported everything already.

From scratch, `grpo train` imports for ten seconds of processor time before it does anything of its own. Tests of what it does after that
need not pay for it each time. What they start is a real process all the same: it has its own arguments, environment, working folder and
output, takes every signal, can be killed, and ends as Python ends, with an exit code.

What differs from a start from scratch: variables that are read by imports count as they were when the first of the commands was started,
and all of them share one seed of Python's hashes.

A command that starts processes of its own, as `--nproc` and `vllm-serve` do, can be given spare ones: children of it that are forked
before it does anything else, and wait until it starts a program, which they are from then on; see `Spare`.
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

MODULES = ("grpo_cli.cli.app", "grpo_cli.engine.run", "grpo_cli.engine.evaluate")
VLLM = ("vllm.entrypoints.llm", "vllm.v1.worker.gpu_model_runner", "vllm.model_executor.models.llama")
GRPO = "from grpo_cli.cli.app import main\nmain()\n"
LAUNCH = f"""
import sys
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

def popen(handler, command, environment):
    program = [sys.executable, "-u", "-m", "grpo_cli"]
    assert list(command[:4]) == program, command
    return spares.pop(0).become(command[4:], environment)

SubprocessHandler._popen = popen
{GRPO}
"""
"""`grpo train --nproc` with spare processes. What starts them, tells them of each other and ends them is the real launcher."""
FORKS_WELL = "jemalloc_bg_thd"
"""Thread of pyarrow's allocator, which sees to it that a fork is safe."""
RANK_NAME = "rank "
"""Beginning of the name of a process that was a spare one, and is one of several that train."""
_MOST_BYTES = 1 << 17
"""Of one request: arguments and environment."""
_MOST_WRITTEN = 1 << 24
"""Bytes of what a command has written."""


class WarmCommand:
    """A running `grpo ARGUMENTS`, with what tests use of `subprocess.Popen`.

    Attributes:
        pid: Its process.
        returncode: As `subprocess` has it; None until its end was noticed.
    """

    def __init__(self, reports: socket.socket, output: IO[str], errors: IO[str]) -> None:
        self._reports = reports
        self._streams = (output, errors)
        self.pid = int(self._report())
        self.returncode: int | None = None

    def _report(self) -> bytes:
        report = self._reports.recv(64)
        assert report, "the process that waits for the command has gone"
        return report

    def poll(self) -> int | None:
        """Give its exit code, or None if it has not ended."""
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self.returncode = int(self._report())
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end."""
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.returncode = int(self._report())
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end, and give all that it has written to its output and to its errors."""
        self.wait(timeout)
        return self.told()

    def told(self) -> tuple[str, str]:
        """Give what it has written so far to its output and to its errors."""
        # A place to read from that it shares with what writes would move where that goes on.
        output, errors = (os.pread(stream.fileno(), _MOST_WRITTEN, 0).decode() for stream in self._streams)
        return output, errors

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, as nothing can prevent."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Let go of what it has written."""
        for each in (*self._streams, self._reports):
            each.close()


class WarmStart:
    """Starts commands by forking; all of them end with the block.

    Args:
        modules: What is imported beforehand.
        environment: With which; this process's if None.
    """

    def __init__(self, modules: Sequence[str] = MODULES, environment: Mapping[str, str] | None = None) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._forking = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self._commands: list[WarmCommand] = []

    def close(self) -> None:
        for command in self._commands:
            command.kill()
            command.close()
        self._requests.close()
        self._forking.wait()

    def start(
        self,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        program: str = GRPO,
        num_spares: int = 0,
    ) -> WarmCommand:
        """Start `grpo ARGUMENTS`.

        Args:
            arguments: The command line.
            environment: All of its environment; this process's if None.
            program: What is run with them, if not the command alone.
            num_spares: How many spare processes it has; the program finds them in its variable `spares`.
        """
        job = {
            "program": program,
            "arguments": [str(argument) for argument in arguments],
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(Path.cwd()),
            "num_spares": num_spares,
        }
        output, errors = (tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2))  # noqa: SIM115  until `close`
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = [output.fileno(), errors.fileno(), theirs.fileno()]
            socket.send_fds(self._requests, [json.dumps(job).encode()], descriptors)
        command = WarmCommand(ours, output, errors)
        self._commands.append(command)
        return command

    def run(
        self,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        program: str = GRPO,
        num_spares: int = 0,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run `grpo ARGUMENTS` to its end. See `start`."""
        command = self.start(*arguments, environment=environment, program=program, num_spares=num_spares)
        output, errors = command.communicate(timeout)
        assert command.returncode is not None
        return subprocess.CompletedProcess([str(one) for one in arguments], command.returncode, output, errors)


@contextmanager
def warm_start(modules: Sequence[str] = MODULES, environment: Mapping[str, str] | None = None) -> Iterator[WarmStart]:
    """Start commands by forking, until the end of the block."""
    start = WarmStart(modules, environment)
    try:
        yield start
    finally:
        start.close()


def forked(requests: socket.socket) -> dict[str, Any]:
    """Fork a process for each request; give, in that process, what was asked for. Ends with the one that asks.

    Between the two is a process that waits for the end, and tells it.
    """
    waiting: list[int] = []
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
        if not request:
            for pid in waiting:
                os.waitpid(pid, 0)
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            break
        waiting.append(pid)
        for descriptor in descriptors:
            os.close(descriptor)
    requests.close()
    *streams, reports = descriptors
    pid = os.fork()
    if pid != 0:
        os.write(reports, str(pid).encode())
        _, status = os.waitpid(pid, 0)
        os.write(reports, str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    for number, descriptor in enumerate(streams, start=1):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    job: dict[str, Any] = json.loads(request)
    return job


class Spare:
    """A child of this process that waits for what it is to be, with what `subprocess.Popen` has of it. It ends with this process.

    Attributes:
        pid: Its process.
        returncode: As `subprocess` has it; None until its end was noticed.
        job: Through which it is told.
    """

    def __init__(self, pid: int, job: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.job = job

    def become(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        name: str = "",
        program: str = GRPO,
        output: int | None = None,
    ) -> "Spare":
        """Let it be `grpo ARGUMENTS`, or another program, in a session of its own.

        Args:
            arguments: The command line.
            environment: All of its environment.
            name: What it is called; by its rank if left out. Who looks at its command line or environment from outside sees those of the
                process that has imported everything.
            program: What is run with the arguments.
            output: Descriptor that its output and its errors go to; to its parent's if None.
        """
        job = {
            "program": program,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
            "name": name or RANK_NAME + environment["RANK"],
        }
        with self.job:
            socket.send_fds(self.job, [json.dumps(job).encode()], [] if output is None else [output])
        return self

    def poll(self) -> int | None:
        """Give its exit code, or None if it has not ended."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another has waited for it, and knows; `subprocess` says 0, too
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float = 300) -> int:
        """Wait for its end."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return code


def with_spares(job: dict[str, Any]) -> tuple[dict[str, Any], list[Spare]]:
    """Fork the spare processes of a job; give it and them, or, in a spare process, what it has become."""
    spares: list[Spare] = []
    for _ in range(job["num_spares"]):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for each in (ours, *(spare.job for spare in spares)):  # whose ends the others wait for
                each.close()
            return _awaited(theirs), []
        theirs.close()
        spares.append(Spare(pid, ours))
    return job, spares


def _awaited(jobs: socket.socket) -> dict[str, Any]:
    os.setsid()
    with jobs:
        request, outputs, _, _ = socket.recv_fds(jobs, _MOST_BYTES, 1)
    if not request:
        os._exit(0)
    for output in outputs:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    job: dict[str, Any] = json.loads(request)
    Path("/proc/self/comm").write_text(job["name"])
    return job


def run_as_asked(job: Mapping[str, Any], spares: list[Spare]) -> None:
    """Be `python -c PROGRAM ARGUMENTS`, or `python -m grpo_cli ARGUMENTS`."""
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    sys.path[0] = job["folder"]
    sys.argv[1:] = job["arguments"]
    exec(job["program"], {"__name__": "__main__", "spares": spares})


def fork_as_asked() -> None:
    """Import, and then start what is asked for."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        import_module(module)
    gc.collect()
    gc.freeze()  # otherwise each collection, and the end, would write to all objects, and so copy all of the memory that is shared
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    others = sorted(set(threads[1:]) - {FORKS_WELL})
    assert not others, f"what a thread holds at a fork is held for ever in the new process: {others}"
    run_as_asked(*with_spares(forked(requests)))


if __name__ == "__main__":
    fork_as_asked()
