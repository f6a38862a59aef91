"""A program whose functions are tested: it is loaded, then what is asked of its objects is answered. Runs in a confined process."""

import os
import types
from collections.abc import Mapping
from typing import Any

from rewards.programs.peer import Peer
from rewards.programs.questions import ASKED_OF_PROGRAMS
from rewards.programs.source import new_module, run_in


def main(task: Mapping[str, Any]) -> None:
    """Load `task["source"]` and answer.

    The first message tells what names it has, each with the name of the module that it stands for or None, or how loading it
    `failed`. What they hold is told when it is asked for: most of it no test needs, and it changes.

    Args:
        task: `source`; `read` and `write`, pipes from and to the checker.
    """
    module = new_module("solution")
    answers = {**ASKED_OF_PROGRAMS, "global": lambda name, /: vars(module)[name]}
    peer = Peer(os.fdopen(task["read"], "rb"), os.fdopen(task["write"], "wb"), answers)
    try:
        run_in(module, task["source"])
    except BaseException as error:  # noqa: BLE001  what leaves fails, unless it leaves well: the tests come later
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            peer.send({"failed": f"{type(error).__name__}: {str(error)[:500]}"})
            return
    names = [name for name in list(vars(module)) if isinstance(name, str) and not name.startswith("__")]
    peer.send({"names": {name: _module_name(vars(module)[name]) for name in names}})
    peer.serve()


def _module_name(value: Any) -> str | None:
    return str(value.__name__) if isinstance(value, types.ModuleType) else None
