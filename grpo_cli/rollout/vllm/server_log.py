"""What vLLM's log tells a person: what it does while it starts, and why it ended."""

import re
from itertools import takewhile
from pathlib import Path

_TAIL_BYTES = 1 << 16
_TAIL_LINES = 4

_STAGES = (
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine"),
    (re.compile(r"Starting to load model"), "loading the model"),
    (re.compile(r"Model loading took|Loading weights took"), "preparing the engine"),
    (
        re.compile(r"torch\.compile (took|takes|cache)|Dynamo bytecode transform|Compiling a graph"),
        "compiling the model",
    ),
    (re.compile(r"Capturing CUDA graphs|Profiling CUDA graph memory"), "capturing CUDA graphs"),
    (re.compile(r"KV cache size|for KV cache"), "preparing the cache"),
    (re.compile(r"Supported tasks"), "opening the port"),
)
"""Lines of vLLM's log, and what they mean that it does."""

_PREFIX = re.compile(r"^(\x1b\[[0-9;]*m)*\([^)]*pid=\d+\)(\x1b\[[0-9;]*m)* ?")
_LOGGED = re.compile(r"^(INFO|WARNING|ERROR|DEBUG) [\d-]+ [\d:]+ \[[^\]]*\] ?")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^([A-Za-z_][\w.]*(Error|Exception|Exit)|.*\berror): \S")
_ECHO = re.compile(r"Engine core initialization failed|WorkerProc initialization failed|died unexpectedly")


class StageReader:
    """Reads the log of a starting server as it grows.

    Args:
        path: The log; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._stage = "importing vLLM"

    def stage(self) -> str:
        """Say what it does, by the lines that came since the last call."""
        try:
            with self._path.open("rb") as log:
                log.seek(self._position)
                text = log.read()
        except OSError:
            return self._stage
        self._position += len(text)
        for line in text.decode(errors="replace").splitlines():
            for pattern, stage in _STAGES:
                if pattern.search(line):
                    self._stage = stage
        return self._stage


def last_words(log_path: Path) -> list[str]:
    """Give the lines at the end of a log that say best why a server ended: its last error, else its last lines."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    lines = [_LOGGED.sub("", _PREFIX.sub("", line)).rstrip() for line in _COLOR.sub("", text).splitlines()]
    lines = [line for line in lines if line]
    # The processes that wait for the one that failed end with errors of their own, which say nothing.
    causes = [index for index, line in enumerate(lines) if _ERROR.match(line) and not _ECHO.search(line)]
    if not causes:
        return lines[-_TAIL_LINES:]
    cause, *after = lines[causes[-1] : causes[-1] + _TAIL_LINES]
    return [cause, *takewhile(lambda line: line.startswith(" "), after)]
