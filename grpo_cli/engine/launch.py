"""Start a command in several processes on this machine, through Accelerate's launcher."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from grpo_cli.errors import TrainingError

SHUTDOWN_SECONDS = 24 * 3600
"""After a signal, until processes that have not ended are killed: a checkpoint takes as long as it takes."""


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run `grpo ARGUMENTS` in several processes, and end them all when one fails or a signal comes.

    What went wrong is told by the process it happened in, or here if it was killed.

    Args:
        count: Number of processes.
        arguments: The command line; each process recognises that it was launched.

    Returns:
        The exit code: that of the process that failed first, 128 and the signal's number after a signal.

    Raises:
        TrainingError: If there are accelerators, but not one for each process.
    """
    if torch.accelerator.is_available() and count > torch.accelerator.device_count():
        raise TrainingError(
            f"--nproc: {count} processes want an accelerator each; there are {torch.accelerator.device_count()}"
        )
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    if not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    options = {
        "num_processes": count,
        "num_machines": 1,
        "mixed_precision": "no",  # the recipe's business
        "dynamo_backend": "no",
        "main_process_port": 0,
        "gpu_ids": "all",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    parsed = launch_command_parser().parse_args(["--multi_gpu", *flags, "-m", "grpo_cli", *arguments])
    parsed.shutdown_timeout = SHUTDOWN_SECONDS
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: the terminal may go
        parsed.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
    try:
        launch_command(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return int(failure.exitcode)
        sys.stderr.write(
            f"error: process {rank} was killed by {signal.Signals(-failure.exitcode).name}\n"
            "  hint: is there enough memory? --resume continues from the last checkpoint\n"
        )
        return 128 - int(failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
