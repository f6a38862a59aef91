"""A program that reads standard input and writes standard output. Runs in a confined process."""

from typing import Any

from rewards.programs.source import new_module, run_in


def main(task: Any) -> None:
    """Run `task["source"]` as a script.

    Raises:
        BaseException: What it raises: the exit code tells.
    """
    run_in(new_module("__main__"), task["source"])
