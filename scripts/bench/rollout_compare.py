"""Measure sampling by each engine on the same prompts, and print how they compare with the built-in one.

    scripts/bench/rollout                  two shapes, the numbers of the README: some 15 minutes on two quiet cores
    scripts/bench/rollout --shapes 64      the smaller shape alone
    scripts/bench/rollout --quick          two layers, a few tokens: shows that everything works; its numbers mean nothing

`local` is the built-in engine, `colocate` vLLM in the training process, `server` a `grpo vllm-serve` beside it. They take turns,
`local` first and last: all of the model's weights to the engine (sync), then completions (sampling). Each has a process of its own,
the same number of threads, and nothing to do while another is at work; medians are compared.
"""

import argparse
import dataclasses
import datetime as dt
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from bench.compare import MODEL, QUICK_LAYERS, model_folder, processor
from bench.rollout_report import BASELINE, ShapeTurns, rollout_table
from bench.worker import Worker
from bench.workload import Workload, make_workload
from grpo_cli.errors import TrainingError
from grpo_cli.rollout.vllm.arguments import vllm_version

ENGINES = (BASELINE, "colocate", "server")
SHAPES = (64, 350)
NUM_GENERATIONS = 8
COMPLETION_LENGTH = 64
QUICK_SHAPES = (24,)
QUICK_COMPLETION_LENGTH = 8
SMALL_PROMPT, SMALL_COMPLETION = 8, 4
WAIT_POLICY = "PASSIVE"
"""Threads that spin while they wait take the processor from the other processes of a server."""


def main() -> int:
    """Run the comparison."""
    arguments = _arguments()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    console = Console(width=None if sys.stdout.isatty() else 160)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        model = model_folder(arguments.model, folder, layers=QUICK_LAYERS if arguments.quick else None)
        length = QUICK_COMPLETION_LENGTH if arguments.quick else COMPLETION_LENGTH
        workloads = {shape: _workload(model, shape, length) for shape in arguments.shapes}
        workers = _start(model, workloads[max(workloads)], arguments.threads, folder, console, stack)
        numbers = itertools.count(1)
        results = []
        for name, workload in workloads.items():
            results.append(_measure(workers, name, workload, arguments.repeats, numbers, console))
            console.print(rollout_table(results[-1]))
    conditions = _conditions(arguments)
    console.print(", ".join(f"{name} {value}" for name, value in conditions.items()), highlight=False, soft_wrap=True)
    if arguments.json is not None:
        record = {**conditions, "shapes": [dataclasses.asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    """Read the command line."""
    summary, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="scripts/bench/rollout",
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", type=int, nargs="+", metavar="TOKENS", help="mean prompt lengths; 64 350")
    parser.add_argument("--repeats", type=int, default=3, help="turns of vLLM at each shape; `local` has one more")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each engine; all cores")
    parser.add_argument("--model", default=MODEL, help="as model.name_or_path of a recipe; SmolLM2-135M-Instruct")
    parser.add_argument("--quick", action="store_true", help="a model of two layers and few tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    arguments = parser.parse_args()
    arguments.shapes = arguments.shapes or (QUICK_SHAPES if arguments.quick else SHAPES)
    if arguments.repeats < 1:
        parser.error("--repeats: every engine takes at least one turn")
    try:
        vllm_version()
    except TrainingError as error:
        parser.error(f"{error.message}: scripts/bench/rollout installs it where it can")
    return arguments


def _workload(model: str, prompt_tokens: int, completion_length: int) -> Workload:
    """Make a workload of which every completion has one length."""
    return make_workload(
        AutoTokenizer.from_pretrained(model),
        prompt_tokens=prompt_tokens,
        num_generations=NUM_GENERATIONS,
        completion_tokens=(completion_length, completion_length),
    )


def _start(
    model: str, longest: Workload, threads: int, folder: Path, console: Console, stack: ExitStack
) -> dict[str, Worker]:
    """Start each engine's process, and have it load the model and sample a little."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": WAIT_POLICY,
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),
    }
    small = dataclasses.asdict(_workload(model, SMALL_PROMPT, SMALL_COMPLETION))
    workers = {}
    for engine in ENGINES:
        console.print(f"starting {engine}", highlight=False)
        command = [sys.executable, "-P", "-m", "bench.rollout_worker"]
        worker = Worker(command, environment=environment, log=folder / f"{engine}.log")
        stack.callback(worker.close)
        worker.ask("load", model=model, engine=engine, longest=dataclasses.asdict(longest), small=small)
        workers[engine] = worker
    return workers


def _measure(
    workers: dict[str, Worker],
    name: int,
    workload: Workload,
    repeats: int,
    numbers: "itertools.count[int]",
    console: Console,
) -> ShapeTurns:
    """Measure one shape: in turns, the baseline first and last."""
    turns: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for engine in (*ENGINES * repeats, BASELINE):
        answer = workers[engine].ask("turn", workload=dataclasses.asdict(workload), number=next(numbers))
        turns[engine].append(answer)
        seconds = {part: cost["wall_seconds"] for part, cost in answer["parts"].items()}
        told = ", ".join(f"{part} {value:.1f} s" for part, value in seconds.items())
        console.print(f"prompts of {name}: {engine}: {told}", highlight=False)
    return ShapeTurns(
        prompt_tokens=name,
        prompts=len(workload.prompts),
        completions=len(workload.rows),
        completion_length=workload.longest_completion,
        turns=turns,
    )


def _conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    """Say what was measured where."""
    packages = ("grpo-cli", "torch", "transformers")
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        **{name: importlib.metadata.version(name) for name in packages},
        "vllm": vllm_version(),
        "python": platform.python_version(),
        "processor": processor(),
        "OMP_NUM_THREADS": arguments.threads,
        "OMP_WAIT_POLICY": WAIT_POLICY,
        "model": arguments.model,
    }


if __name__ == "__main__":
    sys.exit(main())
