"""A program whose functions are tested: it is loaded, then what is asked of its objects is answered. Runs in a confined process."""

import os
import types
from collections.abc import Mapping
from typing import Any

from rewards.programs.peer import OPERATIONS, Peer
from rewards.programs.source import new_module, run_in


def main(task: Mapping[str, Any]) -> None:
    """Load `task["source"]` and answer.

    The first message tells what names it has, each with `module` or `value`, or how loading it `failed`.

    Args:
        task: `source`; `read` and `write`, pipes from and to the checker.
    """
    peer = Peer(os.fdopen(task["read"], "rb"), os.fdopen(task["write"], "wb"), frozenset(OPERATIONS))
    module = new_module("solution")
    try:
        run_in(module, task["source"])
    except BaseException as error:  # noqa: BLE001  SystemExit too: the tests come later
        peer.send({"failed": f"{type(error).__name__}: {str(error)[:500]}"})
        return
    peer.send(
        {
            "names": {
                name: {"module": value.__name__} if isinstance(value, types.ModuleType) else {"value": peer.give(value)}
                for name, value in list(vars(module).items())
                if not name.startswith("__")
            }
        }
    )
    peer.serve()
