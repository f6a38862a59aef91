"""Signals: at once where nothing can be lost, later elsewhere, and never swallowed."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from grpo_cli.engine.signal_watch import GRACE_SECONDS
from grpo_cli.engine.signals import PASSED_ON_SECONDS, REPEATED_SECONDS, StopSignals
from grpo_cli.errors import Interrupted


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_raises_at_once_inside_interruptible_code(number: signal.Signals, exit_code: int) -> None:
    with StopSignals() as signals, pytest.raises(Interrupted) as caught, signals.interruptible():  # noqa: PT012
        signal.raise_signal(number)
        pytest.fail("the signal came too late")
    assert caught.value.exit_code == exit_code


def test_an_ignored_signal_stays_ignored() -> None:
    """What `nohup grpo train ...` relies on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals, signals.interruptible():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signals.received is None


def test_elsewhere_it_waits_for_the_next_interruptible_code() -> None:
    reached = False
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        reached = True
        with pytest.raises(Interrupted), signals.interruptible():
            pytest.fail("the code must not run")
    assert reached


def test_code_that_survives_every_error_does_not_survive_a_signal() -> None:
    swallow = contextlib.suppress(Exception)  # as a reward function may do
    with StopSignals() as signals, pytest.raises(Interrupted), signals.interruptible():  # noqa: PT012
        with swallow:
            signal.raise_signal(signal.SIGTERM)
        pytest.fail("it went on")


def test_code_that_swallows_the_exception_is_stopped_all_the_same() -> None:
    swallow = contextlib.suppress(BaseException)
    with StopSignals() as signals, pytest.raises(Interrupted), signals.interruptible(), swallow:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("wrapping", [ValueError, SystemExit])
def test_code_that_wraps_the_exception_is_stopped_all_the_same(wrapping: type[BaseException]) -> None:
    with StopSignals() as signals, pytest.raises(Interrupted), signals.interruptible():  # noqa: PT012
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise wrapping("a reward function raised") from error


def test_a_second_signal_acts_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_cli.engine.signals.REPEATED_SECONDS", -1)
    with StopSignals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


WAITING = """
import ctypes
import sys
import threading
from grpo_cli.engine.signals import StopSignals

with StopSignals(passed_on=sys.argv[1] == "passed on") as signals, signals.interruptible():
    threading.Timer(0.5, print, ["waiting"], {"flush": True}).start()
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # for ever, whatever comes: as a library that waits for another process
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "code"), [(signal.SIGTERM, signal.SIGTERM, 143), (signal.SIGTERM, signal.SIGINT, 130)]
)
def test_a_second_signal_ends_what_does_not_see_the_first(
    first: signal.Signals, second: signal.Signals, code: int
) -> None:
    with waiting("from a terminal") as process:
        process.send_signal(first)
        time.sleep(REPEATED_SECONDS + 0.2)
        assert process.poll() is None
        process.send_signal(second)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (code, f"stopped by a second {second.name} while waiting\n")


@pytest.mark.slow
def test_the_same_signal_passed_on_is_no_second_one() -> None:
    """It comes twice at once where a launcher and a terminal send it; later than that it is another one."""
    with waiting("passed on") as process:
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        time.sleep(GRACE_SECONDS)
        assert process.poll() is None
        time.sleep(PASSED_ON_SECONDS - GRACE_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143


@pytest.mark.slow
def test_it_ends_also_where_nobody_reads_what_it_says() -> None:
    """As with `grpo train 2>&1 | tee log`, where Ctrl-C has ended `tee`."""
    with waiting("from a terminal") as process:
        assert process.stderr is not None
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        time.sleep(REPEATED_SECONDS + 0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143


SAVING = """
import signal, sys, time
import torch
from grpo_cli.engine.signals import StopSignals
from grpo_cli.errors import Interrupted

torch.set_num_threads(1)
matrix = torch.ones(1500, 1500)
with StopSignals() as signals:
    print("working", flush=True)
    try:
        with signals.interruptible():
            while True:
                matrix @ matrix
    except Interrupted:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            matrix @ matrix
        print("saved", flush=True)
"""


@pytest.mark.slow
def test_a_signal_that_comes_twice_at_once_does_not_cut_the_saving_off() -> None:
    """As `timeout` sends it; Python may call a handler once for several that came while a library computed."""
    with subprocess.Popen([sys.executable, "-c", SAVING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        assert (process.stdout.read(), process.wait(30)) == ("saved\n", 0)


LAUNCHING = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
child.wait()
"""
LAUNCHED = """
import os, signal, time
from grpo_cli.engine.signals import StopSignals
from grpo_cli.errors import Interrupted
from grpo_cli.parent_death import signal_at_parents_death

with StopSignals() as signals:
    signal_at_parents_death(signal.SIGTERM, parent=os.getppid())
    print("working", flush=True)
    try:
        with signals.interruptible():
            time.sleep(60)
    except Interrupted:
        print("saving", flush=True)
        end = time.monotonic() + 4
        while time.monotonic() < end:
            time.sleep(0.1)
        print("saved", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process learns of its parent's death")
def test_a_launcher_that_is_killed_while_all_save_asks_nobody_again() -> None:
    """As by who terminates it, waits, and kills it then."""
    with subprocess.Popen([sys.executable, "-c", LAUNCHING, LAUNCHED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        process.terminate()
        assert process.stdout.readline() == "saving\n"
        time.sleep(REPEATED_SECONDS + 0.2)
        process.kill()
        assert process.stdout.read() == "saved\n"


@contextlib.contextmanager
def waiting(sent: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process whose main thread never sees a signal."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, sent], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "waiting\n"
            yield process
        finally:
            process.kill()


def test_signals_of_a_forked_process_are_not_this_ones() -> None:
    with StopSignals() as signals:
        child = os.fork()
        if child == 0:
            for _ in range(2):
                with contextlib.suppress(BaseException):
                    signal.raise_signal(signal.SIGINT)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(GRACE_SECONDS + 0.5)
    assert signals.received is None


def test_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_ctrl_c_is_not_taken_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_cli.engine.signals.REPEATED_SECONDS", -1)
    with StopSignals() as signals, pytest.raises(KeyboardInterrupt), signals.interruptible():  # noqa: PT012
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_the_exception_travels_between_processes() -> None:
    stop = Interrupted(signal.SIGTERM)
    copy = pickle.loads(pickle.dumps(stop))
    assert (type(copy), str(copy), copy.exit_code) == (Interrupted, "stopped by SIGTERM", 143)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_line_says_what_stopped_it_and_exits_with_its_code(number: signal.Signals, exit_code: int) -> None:
    program = f"""
from grpo_cli.cli import app
from grpo_cli.errors import Interrupted

@app.app.command()
def stopped() -> None:
    raise Interrupted({number})

app.main()
"""
    process = subprocess.run(
        [sys.executable, "-c", program, "stopped"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (process.returncode, process.stdout, process.stderr) == (exit_code, "", f"stopped by {number.name}\n")
