"""Signals: at once where nothing can be lost, later elsewhere, and never swallowed."""

import contextlib
import os
import signal

import pytest

from grpo_cli.engine.signals import StopSignals
from grpo_cli.errors import Interrupted


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_raises_at_once_inside_interruptible_code(number: signal.Signals, exit_code: int) -> None:
    with StopSignals() as signals, pytest.raises(Interrupted) as caught, signals.interruptible():  # noqa: PT012
        os.kill(os.getpid(), number)
        pytest.fail("the signal came too late")
    assert caught.value.exit_code == exit_code


def test_elsewhere_it_waits_for_the_next_interruptible_code() -> None:
    reached = False
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        reached = True
        with pytest.raises(Interrupted), signals.interruptible():
            pytest.fail("the code must not run")
    assert reached


def test_code_that_swallows_the_exception_is_stopped_all_the_same() -> None:
    swallow = contextlib.suppress(Exception)  # as a reward function may do
    with StopSignals() as signals, pytest.raises(Interrupted), signals.interruptible(), swallow:
        os.kill(os.getpid(), signal.SIGTERM)


def test_code_that_wraps_the_exception_is_stopped_all_the_same() -> None:
    with StopSignals() as signals, pytest.raises(Interrupted), signals.interruptible():  # noqa: PT012
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception as error:
            raise ValueError("a reward function raised") from error


def test_a_second_signal_acts_as_usual() -> None:
    with StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
