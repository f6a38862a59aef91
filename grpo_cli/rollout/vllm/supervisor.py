"""Starts a vLLM server as a process group of its own, waits until it is ready, and ends all of it, whatever happens."""

import contextlib
import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from grpo_cli.errors import TrainingError
from grpo_cli.recipe.addresses import TOKEN_VARIABLE
from grpo_cli.rollout.vllm.arguments import server_arguments
from grpo_cli.rollout.vllm.limits import MAX_BODY_MIB, MAX_NUM_GENERATIONS
from grpo_cli.rollout.vllm.middleware import OPEN, STATUS
from grpo_cli.rollout.vllm.process_group_end import kill_group, wait_for_the_rest
from grpo_cli.rollout.vllm.served_process import (
    INSTANCE_VARIABLE,
    MAX_BODY_VARIABLE,
    MAX_GENERATIONS_VARIABLE,
    SUPERVISOR_VARIABLE,
)
from grpo_cli.rollout.vllm.server_log import StageReader, last_words

PROGRESS_SECONDS = 10.0
_POLL_SECONDS = 0.25
_HEALTH_SECONDS = 2.0
_TERM_SECONDS = 15.0
"""vLLM ends within 3 s of SIGTERM; it has no more than this."""
_REPEATED_LOOKS = 8
"""vLLM shares its port with whatever else does so; each new connection then leads to either."""
# What a distributed launcher told the trainer about itself.
_LAUNCHER = re.compile(r"^(RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|TORCHELASTIC_.*)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """How a server is reached, and by whom.

    Attributes:
        name: What the model is called.
        host: Where it listens.
        port: Its port.
        token: What requests must bear; None: nothing.
        max_body_mib: Largest request, in MiB.
        max_num_generations: Most completions of one prompt in one request.
        log_path: File for everything that vLLM says; see `ServerProcess.start`.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    max_body_mib: int = MAX_BODY_MIB
    max_num_generations: int = MAX_NUM_GENERATIONS
    log_path: Path

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{_in_url(self.host)}:{self.port}"


class ServerProcess:
    """A server in a process group of its own, for as long as this object is not stopped and this process lives.

    Used as a context manager, it is stopped at the end.

    Args:
        command: Runs it; the process must call `served_process.end_with_supervisor`, and tell the instance that it finds in its
            environment.
        environment: All of its environment, with the token if it has one.
        host: Where it will listen.
        port: Its port.
        log_path: File for its output.

    Attributes:
        log_path: See above.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], host: str, port: int, log_path: Path
    ) -> None:
        self.log_path = log_path
        self._command = list(command)
        self._environment = dict(environment) | {SUPERVISOR_VARIABLE: str(os.getpid())}
        self._address = (host, port)
        self._process: subprocess.Popen[bytes] | None = None
        self._instance = ""
        self._http: httpx.Client | None = None
        self._log = StageReader(log_path)
        self._was_ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it; it is not ready yet. The log of an earlier start is kept, see `earlier_log`.

        Raises:
            TrainingError: If its port is taken or its log cannot be written.
        """
        refuse_taken_port(*self._address)
        self._instance = uuid.uuid4().hex
        self._log, self._was_ready = StageReader(self.log_path), False
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            if self.log_path.is_file():  # and no device
                self.log_path.replace(self.earlier_log)
            log = self.log_path.open("wb")
        except OSError as error:
            raise TrainingError(f"the log {self.log_path} cannot be written: {error.strerror}") from None
        with log:
            # A session of its own: Ctrl-C reaches this process alone, and the group can be ended as a whole.
            self._process = subprocess.Popen(  # noqa: S603  our own command
                self._command,
                env=self._environment | {INSTANCE_VARIABLE: self._instance},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def earlier_log(self) -> Path:
        """Where the log of the start before this one is, if there was one."""
        return self.log_path.with_suffix(f".1{self.log_path.suffix}")

    def wait_until_ready(self, timeout: float, on_wait: Callable[[str, float], None]) -> float:
        """Wait until it answers: it, and not another server on its port.

        Args:
            timeout: Seconds.
            on_wait: Called about every `PROGRESS_SECONDS` with what it does and the seconds so far.

        Returns:
            Seconds that it took.

        Raises:
            TrainingError: If it ends before, takes longer, or another answers.
        """
        began = time.monotonic()
        told = 0.0
        while True:
            self.raise_if_ended()
            if all(self._answers() for _ in range(_REPEATED_LOOKS)):
                self._was_ready = True
                return time.monotonic() - began
            seconds = time.monotonic() - began
            if seconds > timeout:
                raise self._failure(f"vLLM was not ready after {timeout:g} s ({self._log.stage()})")
            if seconds - told >= PROGRESS_SECONDS:
                told = seconds
                on_wait(self._log.stage(), seconds)
            time.sleep(_POLL_SECONDS)

    def raise_if_ended(self) -> None:
        """Raise if it has ended, for that was not asked for.

        Raises:
            TrainingError: With the end of its log.
        """
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise self._failure(f"vLLM ended {_manner(code)}" + ("" if self._was_ready else f" ({self._log.stage()})"))

    def watch(self) -> None:
        """Wait until it fails.

        Raises:
            TrainingError: When it has ended, or its engine has.
        """
        asked = time.monotonic()
        while True:
            self.raise_if_ended()
            if time.monotonic() - asked >= _HEALTH_SECONDS:
                asked = time.monotonic()
                answer = self._get(OPEN)
                if answer is not None and answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                    raise self._failure("vLLM's engine died")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End it and everything that it started: at first politely, then by force. Does nothing if it was not started.

        It may be started again then.
        """
        if self._http is not None:
            self._http.close()
            self._http = None
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERM_SECONDS)
        kill_group(self._process.pid)
        self._process.wait()
        wait_for_the_rest(self._process.pid)

    def _answers(self) -> bool:
        """Tell whether it answers for itself.

        Raises:
            TrainingError: If another server does.
        """
        answer = self._get(STATUS)
        if answer is None or answer.is_server_error:
            return False
        if not (answer.is_success and self._instance in answer.text):
            host, port = self._address
            raise TrainingError(
                f"another server answers on {host}:{port}",
                hint="choose another port with --port (vllm.server_port), or end the other server",
            )
        return True

    def _get(self, path: str) -> httpx.Response | None:
        """Ask for something; None if there is no answer."""
        if self._http is None:
            self._http = self._client()
        try:
            return self._http.get(path)
        except httpx.HTTPError:
            return None

    def _client(self) -> httpx.Client:
        (host, port), token = self._address, self._environment.get(TOKEN_VARIABLE)
        return httpx.Client(
            base_url=f"http://{_in_url(_reachable(host))}:{port}",
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=_HEALTH_SECONDS,
            # Each look goes to whoever listens by then.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    def _failure(self, what: str) -> TrainingError:
        lines = "".join(f"\n    {line}" for line in last_words(self.log_path))
        return TrainingError(what, hint=f"its log, {self.log_path}, ends with{lines or ' nothing: it is empty'}")


def vllm_server(engine: Mapping[str, Any], serving: Serving) -> ServerProcess:
    """Prepare a server; nothing is started yet.

    Args:
        engine: Of `arguments.engine_arguments`.
        serving: How it is reached.
    """
    arguments = server_arguments(engine, name=serving.name, host=serving.host, port=serving.port)
    return ServerProcess(
        # -P: the working folder is no place to import from.
        [sys.executable, "-P", "-m", "grpo_cli.rollout.vllm.served_process", *arguments],
        environment=_environment(serving),
        host=serving.host,
        port=serving.port,
        log_path=serving.log_path,
    )


def _environment(serving: Serving) -> dict[str, str]:
    """Give vLLM this environment, less what is the trainer's alone."""
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHER.match(name)}
    # The gate checks the token; a second check of vLLM's own would refuse ours.
    for name in (TOKEN_VARIABLE, "VLLM_API_KEY"):
        kept.pop(name, None)
    ours = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights; the gate closes the others
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        MAX_BODY_VARIABLE: str(serving.max_body_mib),
        MAX_GENERATIONS_VARIABLE: str(serving.max_num_generations),
    }
    # Threads that spin while they wait take the processor from the trainer beside them.
    defaults = {"VLLM_NO_USAGE_STATS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    token = {} if serving.token is None else {TOKEN_VARIABLE: serving.token}
    return defaults | kept | ours | token


def refuse_taken_port(host: str, port: int) -> None:
    """Raise if nothing can listen there.

    Raises:
        TrainingError: With the system's reason.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            raise TrainingError(
                f"cannot listen on {host}:{port}: {reason}",
                hint="choose another with --port (vllm.server_port), or end what listens there",
            ) from None


def _manner(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"


def _reachable(host: str) -> str:
    """Give an address under which this machine reaches what listens on all of its addresses."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            return "127.0.0.1" if address.version == 4 else "::1"
    return host


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
