"""Signals: at once where nothing can be lost, later elsewhere, and never swallowed."""

import contextlib
import pickle
import signal
import subprocess
import sys

import pytest

from grpo_cli.engine.signals import StopSignals
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


def test_a_second_signal_acts_as_usual() -> None:
    with StopSignals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_ctrl_c_is_not_taken_for_the_first() -> None:
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
