"""Start a command in several processes on this machine, through Accelerate's launcher."""

import logging
import os
from collections.abc import Sequence

import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def is_launched() -> bool:
    """Tell whether this process is one of several that somebody launched: Accelerate, torchrun, or `launch`."""
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run `grpo ARGUMENTS` in several processes, and end them all when one fails or a signal comes.

    What went wrong is told by the process it happened in.

    Args:
        count: Number of processes.
        arguments: The command line; each process recognises that it was launched.

    Returns:
        The exit code: that of the process that failed first, 128 and the signal's number after a signal.
    """
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    if not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    options = {
        "num_processes": count,
        "num_machines": 1,
        "mixed_precision": "no",  # the recipe's business
        "dynamo_backend": "no",
        "main_process_port": 0,
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    parsed = launch_command_parser().parse_args(["--multi_gpu", *flags, "-m", "grpo_cli", *arguments])
    try:
        launch_command(parsed)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
