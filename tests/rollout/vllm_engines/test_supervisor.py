"""The supervisor, with small real processes in vLLM's place: what it starts is ready, or ends with a reason, and never stays."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from vllm_server import free_port

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.vllm import supervisor as supervising
from grpo_cli.rollout.vllm.server_log import StageReader, last_words
from grpo_cli.rollout.vllm.supervisor import ServerProcess, Serving, refuse_taken_port, vllm_server

SERVER = """\
import json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from grpo_cli.rollout.vllm.served_process import INSTANCE_VARIABLE, TOKEN_VARIABLE, end_with_supervisor

port, folder, *manners = sys.argv[1:]
end_with_supervisor()
if "deaf" in manners:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "child" in manners:
    child = subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; while true; do sleep 1; done"])
    (Path(folder) / "child").write_text(str(child.pid))
(Path(folder) / "server").write_text(str(os.getpid()))
print("Starting to load model", flush=True)
if "dies" in manners:
    print("ValueError: this model is too large", flush=True)
    sys.exit(3)
if "never" in manners:
    time.sleep(600)

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        bearer = f"Bearer {os.environ.get(TOKEN_VARIABLE)}"
        if self.path == "/health":
            status = 503 if (Path(folder) / "sick").exists() else 200
        else:
            status = 200 if self.headers["Authorization"] in (None, bearer) else 401
        body = json.dumps({"instance": os.environ[INSTANCE_VARIABLE]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

HTTPServer.allow_reuse_port = True  # as vLLM does
HTTPServer(("127.0.0.1", int(port)), Answers).serve_forever()
"""

SUPERVISOR = """\
import sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parents[1])]
from test_supervisor import prepared
server = prepared(Path(sys.argv[2]), int(sys.argv[3]), "child")
server.start()
server.wait_until_ready(60, lambda stage, seconds: None)
print("ready", flush=True)
time.sleep(600)
"""


def prepared(folder: Path, port: int, *manners: str) -> ServerProcess:
    script = folder / "server.py"
    script.write_text(SERVER)
    return ServerProcess(
        [sys.executable, str(script), str(port), str(folder), *manners],
        environment=os.environ,
        host="127.0.0.1",
        port=port,
        log_path=folder / "logs" / "server.log",
    )


@pytest.fixture
def port() -> int:
    return free_port()


def silent(stage: str, seconds: float) -> None:
    pass


def pid_in(path: Path) -> int:
    return int(path.read_text())


def alive(pid: int) -> bool:
    """A process that has ended and that nobody has asked about yet is dead."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def soon(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_server_gets_ready_and_is_gone_after_the_block(tmp_path: Path, port: int) -> None:
    with prepared(tmp_path, port, "child") as server:
        server.start()
        assert server.wait_until_ready(30, silent) > 0
        server.raise_if_ended()
        pids = [pid_in(tmp_path / "server"), pid_in(tmp_path / "child")]
        assert all(map(alive, pids))
        assert os.getpgid(pids[0]) == os.getpgid(pids[1]) != os.getpgrp()
    assert not any(map(alive, pids))
    refuse_taken_port("127.0.0.1", port)


def test_a_server_that_dies_early_is_told_with_the_end_of_its_log(tmp_path: Path, port: int) -> None:
    with prepared(tmp_path, port, "dies", "child") as server:
        server.start()
        with pytest.raises(TrainingError) as failure:
            server.wait_until_ready(30, silent)
    assert failure.value.exit_code == 4
    assert failure.value.message == "vLLM ended with exit code 3 (loading the model)"
    log = tmp_path / "logs" / "server.log"
    assert failure.value.hint == f"its log, {log}, ends with\n    ValueError: this model is too large"
    assert not alive(pid_in(tmp_path / "child"))


def test_a_killed_server_is_told_by_the_signals_name(tmp_path: Path, port: int) -> None:
    with prepared(tmp_path, port, "child") as server:
        server.start()
        server.wait_until_ready(30, silent)
        os.kill(pid_in(tmp_path / "server"), signal.SIGKILL)
        with pytest.raises(TrainingError, match="ended by signal SIGKILL"):
            server.watch()
        assert alive(pid_in(tmp_path / "child"))
    assert not alive(pid_in(tmp_path / "child"))


def test_a_server_that_never_gets_ready_is_given_up_with_progress_on_the_way(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "PROGRESS_SECONDS", 0.5)
    told: list[tuple[str, float]] = []
    with prepared(tmp_path, port, "never") as server:
        server.start()
        with pytest.raises(TrainingError, match=r"not ready after 3 s \(loading the model\)"):
            server.wait_until_ready(3, lambda stage, seconds: told.append((stage, seconds)))
    assert 2 <= len(told) <= 6
    assert told[-1][0] == "loading the model"
    assert [seconds for _, seconds in told] == sorted(seconds for _, seconds in told)
    assert not alive(pid_in(tmp_path / "server"))


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "_TERM_SECONDS", 1.0)
    server = prepared(tmp_path, port, "deaf", "child")
    server.start()
    server.wait_until_ready(30, silent)
    server.stop()
    assert not alive(pid_in(tmp_path / "server"))
    assert not alive(pid_in(tmp_path / "child"))
    server.stop()  # once more does nothing


def test_a_server_whose_engine_died_is_given_up(tmp_path: Path, port: int) -> None:
    """vLLM answers 503 then, and otherwise stays as if nothing had happened."""
    with prepared(tmp_path, port) as server:
        server.start()
        server.wait_until_ready(30, silent)
        (tmp_path / "sick").touch()
        with pytest.raises(TrainingError, match="engine died"):
            server.watch()


def test_nothing_outlives_a_supervisor_that_was_killed(tmp_path: Path, port: int) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(Path(__file__).parent), str(tmp_path), str(port)], stdout=subprocess.PIPE
    )
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == b"ready\n"
    pids = [pid_in(tmp_path / "server"), pid_in(tmp_path / "child")]
    supervisor.kill()
    supervisor.communicate()
    gone = soon(lambda: not any(map(alive, pids)))
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    assert gone


def test_a_taken_port_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with prepared(tmp_path, port) as server, pytest.raises(TrainingError, match=f"127.0.0.1:{port}: address alr"):
            server.start()
    assert not (tmp_path / "server").exists()


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_an_error(host: str) -> None:
    with pytest.raises(TrainingError, match=f"cannot listen on {host}:8000"):
        refuse_taken_port(host, 8000)


def test_another_server_on_the_port_is_not_taken_for_ones_own(tmp_path: Path, port: int) -> None:
    """Both found the port free: neither listened yet."""
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    with prepared(folders[0], port) as first, prepared(folders[1], port, "never") as second:
        first.start()
        second.start()
        first.wait_until_ready(30, silent)
        with pytest.raises(TrainingError, match=f"another server answers on 127.0.0.1:{port}"):
            second.wait_until_ready(30, silent)
        second.stop()
        first.raise_if_ended()


def test_two_servers_that_share_a_port_are_never_both_ready(tmp_path: Path, port: int) -> None:
    """The kernel leads each connection to either of them."""
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()

    def all_listen() -> bool:
        pids = [folder / "server" for folder in folders]
        return all(path.exists() and psutil.Process(pid_in(path)).net_connections() for path in pids)

    def wait_for_both() -> None:
        first.wait_until_ready(30, silent)
        second.wait_until_ready(30, silent)

    with prepared(folders[0], port) as first, prepared(folders[1], port) as second:
        first.start()
        second.start()
        assert soon(all_listen)
        with pytest.raises(TrainingError, match=f"another server answers on 127.0.0.1:{port}"):
            wait_for_both()


def test_the_log_of_the_start_before_is_kept(tmp_path: Path, port: int) -> None:
    with prepared(tmp_path, port, "dies") as server:
        for _ in range(3):
            server.start()
            with pytest.raises(TrainingError, match="exit code 3"):
                server.wait_until_ready(30, silent)
            server.stop()
    logs = tmp_path / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["server.1.log", "server.log"]
    assert (logs / "server.1.log").read_text() == (logs / "server.log").read_text() != ""


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path, port: int) -> None:
    (tmp_path / "logs").write_text("a file")
    with prepared(tmp_path, port) as server, pytest.raises(TrainingError, match=r"server\.log cannot be written"):
        server.start()


def test_the_token_is_in_the_environment_and_not_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users see a process's command, and only its owner its environment. What a launcher said to the trainer stays there."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("GRPO_VLLM_TOKEN", "another")
    serving = Serving(name="tiny", token="correct-horse", log_path=tmp_path / "log", max_num_generations=5)
    server = vllm_server({"model": "folder", "dtype": "float32"}, serving)
    assert not any("correct-horse" in word for word in server._command)
    environment = server._environment
    assert environment["GRPO_VLLM_TOKEN"] == "correct-horse"
    assert environment["GRPO_VLLM_MAX_NUM_GENERATIONS"] == "5"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "VLLM_API_KEY"} & set(
        environment
    )
    assert environment["PATH"] == os.environ["PATH"]
    without = vllm_server({"model": "folder"}, Serving(name="tiny", log_path=tmp_path / "log"))
    assert "GRPO_VLLM_TOKEN" not in without._environment


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000"), ("node7", "http://node7:8000")],
)
def test_addresses_are_written_as_urls(host: str, url: str, tmp_path: Path) -> None:
    assert Serving(name="tiny", host=host, log_path=tmp_path).url == url


LOG = """\
(APIServer pid=7) INFO 11-29 23:19:40 [model.py:2152] Using max model len 512
(EngineCore pid=8) ERROR 11-29 23:19:52 [core.py:1234] Traceback (most recent call last):
(EngineCore pid=8) ERROR 11-29 23:19:52 [core.py:1234]   File "core.py", line 1, in run
(EngineCore pid=8) ERROR 11-29 23:19:52 [core.py:1234] pydantic.ValidationError: 1 validation error for Config
(EngineCore pid=8) ERROR 11-29 23:19:52 [core.py:1234]   Value error, too long
\x1b[0;36m(APIServer pid=7)\x1b[0;0m Traceback (most recent call last):
(APIServer pid=7)   File "serve.py", line 1, in cmd
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""


def test_last_words_are_the_cause_and_not_its_echo(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    assert last_words(log) == ["pydantic.ValidationError: 1 validation error for Config", "  Value error, too long"]


def test_without_an_error_the_last_words_are_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"(APIServer pid=7) INFO 11-29 23:19:40 [a.py:1] line {index}" for index in range(9)))
    assert last_words(log) == [f"line {index}" for index in range(5, 9)]
    assert last_words(tmp_path / "none") == []


def test_stages_follow_the_log_as_it_grows(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reader = StageReader(log)
    assert reader.stage() == "importing vLLM"
    with log.open("w") as file:
        for line, stage in (
            ("WARNING Enforce eager set, disabling torch.compile", "importing vLLM"),
            ("INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0)", "starting the engine"),
            ("INFO [cpu_model_runner.py:68] Starting to load model /models/tiny...", "loading the model"),
            ("INFO [kv_cache_utils.py:2327] GPU KV cache size: 4,194,304 tokens", "preparing the cache"),
        ):
            file.write(f"{line}\n")
            file.flush()
            assert reader.stage() == stage
