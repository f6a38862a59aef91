"""Escapes from confined processes, in every layer that works on this machine."""

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from confined_processes import CONFINING, LIMITS, PROGRAM, assert_refused, run, said

from rewards.confinement.choice import choose, examine
from rewards.confinement.layers import Layer, environment, readable_paths
from rewards.confinement.process import End
from rewards.confinement.sandbox import ConfinementError, Sandbox


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Whatever a program did, nothing of it runs or waits to be collected afterwards."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    after = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert psutil.wait_procs(after, timeout=2)[1] == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in which everybody may do everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folder.chmod(0o777)
        yield folder


def test_a_program_reads_computes_and_writes(sandbox: Sandbox) -> None:
    source = """
        import collections, json, math, re, tempfile, threading
        import numpy
        with open("notes.txt", "w") as file:
            file.write("kept")
        with open("notes.txt") as file:
            assert file.read() == "kept"
        with tempfile.NamedTemporaryFile("w+") as file:
            file.write("kept")
        found = []
        thread = threading.Thread(target=lambda: found.append(numpy.arange(10).reshape(2, 5) @ numpy.ones(5)))
        thread.start()
        thread.join()
        print(found[0].tolist(), input(), __name__)
    """
    assert said(sandbox, source, text=b"told") == ["[10.0, 35.0] told __main__"]


def test_asyncio_works(sandbox: Sandbox) -> None:
    assert said(sandbox, "import asyncio\nasync def f():\n    return 7\nprint(asyncio.run(f()))") == ["7"]


def test_there_is_no_network(sandbox: Sandbox, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as named:
        port = listener.getsockname()[1]
        named.bind(str(tmp_path / "listens"))
        named.listen()
        attempts = [
            f"socket.create_connection(('127.0.0.1', {port}), timeout=2)",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
            "socket.socket(socket.AF_INET6)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'listens')!r})",
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '/dev/log')",
            "checked(system_call(425, 8, ctypes.create_string_buffer(256)))",  # io_uring_setup
            "socket.gethostbyname('example.com')",
        ]
        assert_refused(sandbox, attempts)
        for each in (listener, named):
            each.settimeout(0)
            with pytest.raises(BlockingIOError):
                each.accept()


def test_there_are_no_other_processes(sandbox: Sandbox) -> None:
    attempts = [
        "os.fork()",
        "os.forkpty()",
        "subprocess.run(['/bin/true'])",
        "os.execv('/bin/true', ['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "checked(os.system('true'))",
        "checked(system_call(435, ctypes.create_string_buffer(88), 88))",  # clone3
    ]
    assert_refused(sandbox, attempts)


def test_a_fork_bomb_and_a_thread_bomb_fizzle_out(sandbox: Sandbox) -> None:
    source = """
        import os, threading, time
        refused = 0
        for _ in range(1000):
            try:
                os.fork()
            except PermissionError:
                refused += 1
        threading.stack_size(1 << 16)
        started = 0
        while True:
            try:
                threading.Thread(target=time.sleep, args=(0.2,)).start()
                started += 1
            except RuntimeError:
                break
        print(refused, started)
    """
    refused, started = map(int, said(sandbox, source)[0].split())
    assert refused == 1000
    assert started < LIMITS.max_threads or os.getuid() != 0


def test_files_outside_cannot_be_read(sandbox: Sandbox, open_folder: Path) -> None:
    secret = open_folder / "secret.txt"
    secret.write_text("open to all", encoding="utf-8")
    secret.chmod(0o666)
    attempts = [
        *(f"open({str(path)!r}).read()" for path in (secret, Path(__file__), f"/proc/self/root{secret}")),
        f"os.listdir({str(open_folder)!r})",
        f"os.symlink({str(secret)!r}, 'link')",
        f"os.link({str(secret)!r}, 'link')",
        f"shutil.copy({str(secret)!r}, 'copy')",
        f"open('/proc/{os.getpid()}/environ').read()",
        f"open('/proc/{os.getpid()}/cmdline').read()",
        f"open('/proc/{os.getpid()}/cwd/pyproject.toml').read()",
        "open('/etc/passwd').read()",
        "open('/etc/shadow').read()",
    ]
    assert_refused(sandbox, attempts)


def test_files_outside_cannot_be_changed(sandbox: Sandbox, open_folder: Path) -> None:
    kept = open_folder / "kept.txt"
    kept.write_text("as it was", encoding="utf-8")
    kept.chmod(0o666)
    before = kept.stat()
    library = Path(os.__file__)
    attempts = [
        *(f"open({str(kept)!r}, {mode!r})" for mode in ("w", "a", "r+")),
        *(f"os.{call}({str(kept)!r})" for call in ("remove", "unlink")),
        f"os.rename({str(kept)!r}, 'mine')",
        f"os.truncate({str(kept)!r}, 0)",
        f"os.chmod({str(kept)!r}, 0)",
        f"os.chown({str(kept)!r}, 12345, 12345)",
        f"os.utime({str(kept)!r}, (0, 0))",
        f"open({str(open_folder / 'new.txt')!r}, 'w')",
        f"os.mkdir({str(open_folder / 'new')!r})",
        *(f"open({path!r}, 'w')" for path in (f"{tempfile.gettempdir()}/new", "/usr/lib/new", "/dev/shm/new", "/new")),
        f"open({str(library.with_name('new.py'))!r}, 'w')",
        f"open({str(library)!r}, 'a')",
    ]
    assert_refused(sandbox, attempts)
    assert kept.read_text(encoding="utf-8") == "as it was"
    after = kept.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime) == (before.st_mode, before.st_uid, before.st_mtime)
    assert sorted(path.name for path in open_folder.iterdir()) == ["kept.txt"]


def test_the_environment_is_empty(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "correct-horse")
    source = """
        import os
        print(sorted(os.environ))
        try:
            print(open("/proc/self/environ").read())
        except OSError:
            pass
    """
    lines = said(sandbox, source)
    assert "correct-horse" not in "\n".join(lines)
    assert set(eval(lines[0])) - {"LC_CTYPE", "PWD"} == set(environment(""))


def test_the_parent_is_out_of_reach(sandbox: Sandbox) -> None:
    """By signal, by descriptor, by way of a file's owner, by limits, by priority, by looking in."""
    received: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    limits, nice = resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE), os.getpriority(os.PRIO_PROCESS, 0)
    me = os.getpid()
    attempts = [
        *(f"os.kill({target}, signal.SIGUSR1)" for target in (me, "os.getppid()", -me, -1, 0)),
        f"os.killpg({os.getpgid(0)}, signal.SIGUSR1)",
        f"signal.pidfd_send_signal(os.pidfd_open({me}), signal.SIGUSR1)",
        f"checked(system_call(129, {me}, signal.SIGUSR1, ctypes.create_string_buffer(128)))",  # rt_sigqueueinfo
        f"fcntl.fcntl(0, fcntl.F_SETOWN, {me})",
        "fcntl.fcntl(0, 10, signal.SIGUSR1)",  # F_SETSIG
        f"checked(system_call(101, 16, {me}, 0, 0))",  # ptrace
        f"resource.prlimit({me}, resource.RLIMIT_NOFILE, (1, 1))",
        f"os.setpriority(os.PRIO_PROCESS, {me}, 19)",
        f"os.sched_setaffinity({me}, {{0}})",
        f"open('/proc/{me}/mem', 'r+b')",
        "os.setuid(0)",
        "checked(ctypes.CDLL(None, use_errno=True).unshare(0x10000000))",
    ]
    try:
        assert_refused(sandbox, attempts)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert received == []
    assert resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE) == limits
    assert os.getpriority(os.PRIO_PROCESS, 0) == nice


def test_infinite_output_is_cut_off(sandbox: Sandbox) -> None:
    for stream in ("stdout", "stderr"):
        finished = run(sandbox, f"import sys\nwhile True:\n    sys.{stream}.write('x' * 1000)")
        assert finished.end is End.OUTPUT
        assert (
            LIMITS.max_output_bytes < len(finished.output + finished.errors) < 2 * LIMITS.max_output_bytes + (1 << 16)
        )


def test_a_memory_balloon_bursts(sandbox: Sandbox) -> None:
    finished = run(sandbox, "kept = []\nwhile True:\n    kept.append(bytearray(1 << 24))")
    assert (finished.end, finished.code) == (End.EXIT, 1)
    assert finished.errors.decode().splitlines()[-1] == "MemoryError"


@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(60)", "input()"])
def test_time_is_up(sandbox: Sandbox, source: str) -> None:
    started = time.monotonic()
    finished = sandbox.run(PROGRAM, {"source": source}, text=b"\n" * (source == "input()"), seconds=1.0)
    assert finished.end is (End.EXIT if source == "input()" else End.TIME)
    assert time.monotonic() - started < 5


def test_a_program_that_closes_its_output_and_ignores_signals_ends_all_the_same(sandbox: Sandbox) -> None:
    source = """
        import os, signal, time
        for number in range(1, 32):
            try:
                signal.signal(number, signal.SIG_IGN)
            except OSError:
                pass
        os.close(1)
        os.close(2)
        time.sleep(60)
    """
    assert run(sandbox, source, seconds=1.0).end is End.TIME


def test_much_input_and_output_do_not_wait_for_each_other(sandbox: Sandbox) -> None:
    text = b"x" * (1 << 20)
    assert run(sandbox, "print('never reads')", text=text).output == b"never reads\n"
    assert run(sandbox, "import sys\nprint(len(sys.stdin.read()))", text=text).output == b"1048576\n"
    echoed = run(sandbox, "import sys\nfor _ in range(30):\n    print(sys.stdin.read(1000))\nprint('end')", text=text)
    assert echoed.output.endswith(b"end\n")


def test_a_crash_is_told_from_an_exit_code(sandbox: Sandbox) -> None:
    crashed = run(sandbox, "import ctypes\nctypes.string_at(0)")
    assert (crashed.end, crashed.code) == (End.SIGNAL, signal.SIGSEGV)
    exited = run(sandbox, "raise SystemExit(7)")
    assert (exited.end, exited.code) == (End.EXIT, 7)


def test_programs_at_the_same_time_do_not_see_each_other(sandbox: Sandbox) -> None:
    with sandbox.started(PROGRAM, {"source": "import time; time.sleep(60)"}, seconds=60) as other:
        Path(other.folder, "secret").write_text("x", encoding="utf-8")
        assert_refused(sandbox, [f"os.listdir({other.folder!r})", f"os.kill({other.process.pid}, 9)"])
        assert other.process.poll() is None


def test_a_program_dies_with_the_one_who_started_it(sandbox: Sandbox, tmp_path: Path) -> None:
    script = f"""
        from rewards.confinement.layers import Layer
        from rewards.confinement.limits import Limits
        from rewards.confinement.sandbox import Sandbox
        sandbox = Sandbox(layer=Layer({str(sandbox.layer)!r}), limits=Limits())
        with sandbox.started({PROGRAM!r}, {{"source": "import time; time.sleep(60)"}}, seconds=60):
            print("started", flush=True)
            import time; time.sleep(60)
    """
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        # Nobody is left to remove the program's folder. This one is closed to all other users.
        env={
            **os.environ,
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        },
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"started\n"
        confined = psutil.Process(starter.pid).children(recursive=True)
        starter.kill()
    assert confined
    assert psutil.wait_procs(confined, timeout=5)[1] == []


def test_what_a_program_may_read_is_the_interpreters() -> None:
    readable = [Path(path) for path in readable_paths()]
    assert not any(Path(folder).is_relative_to(each) for each in readable for folder in (Path.home(), Path.cwd()))
    assert any(Path(os.__file__).is_relative_to(each) for each in readable)


def test_limits_alone_are_no_confinement() -> None:
    opened = examine(Sandbox(layer=Layer.LIMITS, limits=LIMITS))
    assert {"network", "files", "processes"} <= set(opened)
    assert "memory" not in opened


def test_the_choice_is_the_strongest_layer_that_holds() -> None:
    choice, holding = choose(LIMITS), []
    for layer in CONFINING:
        try:
            holding += [layer] * (examine(Sandbox(layer=layer, limits=LIMITS)) == ())
        except ConfinementError:
            continue
    if not holding:
        assert choice.open
        assert choice.describe().startswith("UNCONFINED, network and files")
        pytest.skip("nothing confines on this machine")
    assert (choice.sandbox.layer, choice.open) == (holding[0], ())
    assert choice.describe().startswith(f"confined by {holding[0]}, ")
