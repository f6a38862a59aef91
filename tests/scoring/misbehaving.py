"""Reward functions that nobody wants in their trainer's process. They misbehave over completions that contain `bad`."""

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def _scores(completions: list[str], misbehave: Callable[[], Any]) -> list[float]:
    if any("bad" in text for text in completions):
        misbehave()
    return [float(len(text)) for text in completions]


def exits(completions: list[str]) -> list[float]:
    return _scores(completions, lambda: sys.exit(3))


def exits_hard(completions: list[str]) -> list[float]:
    return _scores(completions, lambda: os._exit(7))


def crashes(completions: list[str]) -> list[float]:
    return _scores(completions, lambda: ctypes.string_at(0))


def raises(completions: list[str]) -> list[float]:
    def fail() -> None:
        raise LookupError("no such word")

    return _scores(completions, fail)


def sleeps(completions: list[str]) -> list[float]:
    return _scores(completions, lambda: time.sleep(1000))


def prints(completions: list[str]) -> list[float]:
    def fill() -> None:
        for _ in range(30):
            sys.stdout.write("x" * 2**20)
            sys.stderr.write("y" * 2**20)

    return _scores(completions, fill)


def says_last_words(completions: list[str]) -> list[float]:
    def end() -> None:
        os.write(1, b"the index is missing\n")
        os._exit(1)

    return _scores(completions, end)


def balloons(completions: list[str]) -> list[float]:
    def grow() -> None:
        held = []
        while True:
            held.append(np.ones(2**21))  # 16 MiB
            time.sleep(0.01)

    return _scores(completions, grow)


def multiplies(completions: list[str]) -> list[float]:
    def bomb() -> None:
        for _ in range(64 + 8 * (os.cpu_count() or 1) + 20):
            if os.fork() == 0:
                time.sleep(1000)
        time.sleep(1000)

    return _scores(completions, bomb)


def forks(completions: list[str]) -> list[float]:
    """Both processes go on, and would both answer."""
    _scores(completions, os.fork)
    return [float(len(text)) for text in completions]


def leaves_children(completions: list[str], folder: str) -> list[float]:
    """One in a session of its own, one that is nobody's child any more."""

    def leave() -> None:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        orphan = subprocess.run(
            ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
        )
        Path(folder, "pids").write_text(f"{child.pid} {orphan.stdout}")
        time.sleep(1000)

    return _scores(completions, leave)


def leaves_and_exits(completions: list[str], folder: str) -> list[float]:
    """A child in a session of its own, and then its own end."""

    def leave() -> None:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(folder, "pids").write_text(str(child.pid))
        os._exit(4)

    return _scores(completions, leave)


def leaves_orphans(completions: list[str]) -> list[float]:
    """Many processes that end at once, and that nobody waits for."""
    for _ in range(64 + 8 * (os.cpu_count() or 1) + 20):
        subprocess.run(["sh", "-c", "true &"], check=True)
    return [float(len(text)) for text in completions]


HELD: list[Any] = []


def leaks(completions: list[str]) -> list[float]:
    """A little each time."""
    HELD.append(np.ones(2**22))  # 32 MiB
    return [float(os.getpid())] * len(completions)


def shouts(completions: list[str]) -> list[float]:
    raise ValueError("\x1b[2J" + "loud " * 10**6)


class Weights(list[Any]):
    """Has a state that is no JSON, as a module of torch has."""

    def __call__(self, completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    def named_parameters(self) -> list[Any]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {"weight": np.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def tells(completions: list[str], truth: list[int], log_extra: Any, log_metric: Any, **_: Any) -> Any:
    log_extra("answer", [text.upper() for text in completions])
    log_extra("odd", [np.float32(0.5)] * len(completions))
    log_metric("tell/length", 1.0)
    log_metric("tell/length", 4.0)
    return np.array([float(each) for each in truth])


def returns(completions: list[str], what: str) -> Any:
    return {
        "none": [None] * len(completions),
        "nan": [float("nan")] * len(completions),
        "words": ["good"] * len(completions),
        "short": [1.0],
        "nothing": None,
        "array": np.ones(len(completions), dtype=np.float32),
        "numbers": [np.float32(1.5), True] * (len(completions) // 2),
    }[what]


async def waits(completions: list[str]) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in completions]


def counts_and_sleeps(completions: list[str], folder: str) -> list[float]:
    Path(folder, str(len(list(Path(folder).iterdir())))).touch()
    time.sleep(1000)
    return [0.0] * len(completions)


def describes(completions: list[str], thing: list[Any], **_: Any) -> list[float]:
    raise ValueError(f"{type(thing[0]).__name__} {thing[0]!r}")


def meets(completions: list[str], folder: str, count: int) -> list[float]:
    """Waits until as many calls are under way."""
    Path(folder, str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(list(Path(folder).iterdir())) < count:
        if time.monotonic() > deadline:
            raise TimeoutError("nobody came")
        time.sleep(0.01)
    return [float(len(text)) for text in completions]


class Counter:
    """Counts its calls, and ends its process over `bad` completions after it has counted."""

    isolated = True

    def __init__(self, start: int = 0) -> None:
        self.calls = start

    def describe(self) -> str:
        return f"counts from {self.calls}"

    def __call__(self, completions: list[str]) -> list[float]:
        self.calls += 1
        _scores(completions, lambda: os._exit(1))
        return [float(self.calls)] * len(completions)

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Waiting(Counter):
    """Is waited for."""

    isolated = False

    async def __call__(self, completions: list[str]) -> list[float]:  # type: ignore[override]
        return super().__call__(completions)


class Unloadable:
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("the index is missing")

    def __call__(self, completions: list[str]) -> list[float]:
        return [0.0] * len(completions)
