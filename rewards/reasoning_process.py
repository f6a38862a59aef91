"""The process behind `rewards.reasoning`: one question a line on stdin, one reply a line on stdout, both JSON.

A question is `{"entry": ..., "answer": ...}`: what `grpo_cli.data.reasoning` put into the column `entry`, and the answer to be
scored. A reply is `{"score": ...}`, or `{"problem": ...}` if the entry is of no task. It stands alone and is run as a script. It
ends when stdin does.
"""

import contextlib
import json
import resource
import sys
from functools import lru_cache
from typing import Any

import psutil
from reasoning_gym import create_dataset

_BYTES = 4 * 2**30
"""What scoring may take of memory: some scorers evaluate an answer as Python, and `"a" * 10**12` is short enough to write."""


@lru_cache(maxsize=256)
def _task(name: str, configuration: str) -> Any:
    return create_dataset(name, **json.loads(configuration))


def _reply(entry: dict[str, Any], answer: str) -> dict[str, Any]:
    try:
        task = _task(entry["task"], json.dumps(entry["configuration"]))
    except Exception as error:  # noqa: BLE001  a task checks its configuration in ways of its own
        return {"problem": f"reasoning-gym cannot make the task of an entry: {type(error).__name__}: {error}"}
    try:
        return {"score": float(task.score_answer(answer, entry))}
    except Exception:  # noqa: BLE001  what a scorer cannot read is no answer, however it fails
        return {"score": 0.0}


def _limit_memory() -> None:
    limit = psutil.Process().memory_info().vms + _BYTES
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def main() -> None:
    """Answer until there is no question left."""
    _limit_memory()
    protocol = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # a scorer that prints must not be taken for its score
        print(json.dumps("ready"), file=protocol, flush=True)
        for line in sys.stdin:
            print(json.dumps(_reply(**json.loads(line))), file=protocol, flush=True)


if __name__ == "__main__":
    main()
