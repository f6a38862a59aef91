"""Train the quickstart with everything that saves work and without it, and print the two reward curves.

    PYTHONPATH=scripts python -m bench.curves [--seeds 0 1] [--steps 24]

With the same seed both runs draw the same prompts, and the same completions until rounding makes one token fall another way. From
then on they are two runs of one experiment, and the curves have to agree within what two seeds differ by.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

RECIPE = "recipes/quickstart.yaml"
SWITCHED_OFF = ("model.share_prefix=false", "train.gradient_checkpointing=false", "train.micro_batch_tokens=8192")
"""Padded rows, the model's own cache, every activation kept, and one micro-batch where that fits."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="bench.curves", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, help="optimizer steps; the recipe's if left out")
    arguments = parser.parse_args()
    curves, seconds = {}, {}
    with tempfile.TemporaryDirectory(prefix="curves-") as folder:
        for seed in arguments.seeds:
            for name, changes in (("on", ()), ("off", SWITCHED_OFF)):
                began = time.perf_counter()
                curves[seed, name] = _rewards(Path(folder) / f"{name}-{seed}", seed, arguments.steps, changes)
                seconds[seed, name] = time.perf_counter() - began
    Console(width=100).print(_table(curves, seconds))


def _rewards(folder: Path, seed: int, steps: int | None, changes: tuple[str, ...]) -> list[float]:
    """Train once and give the mean reward of every step."""
    settings = [f"train.seed={seed}", f"train.output_dir={folder}", *changes]
    settings += [] if steps is None else [f"train.max_steps={steps}"]
    command = [sys.executable, "-m", "grpo_cli", "train", RECIPE, *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  our own command
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["reward"] for record in map(json.loads, lines) if "reward" in record]


def _table(curves: dict[tuple[int, str], list[float]], seconds: dict[tuple[int, str], float]) -> Table:
    """Put the curves side by side."""
    table = Table(title="mean reward by step, with everything that saves work on and off", title_justify="left")
    table.add_column("step", justify="right")
    for seed, name in curves:
        table.add_column(f"seed {seed} {name}", justify="right")
    for step, rewards in enumerate(zip(*curves.values(), strict=True), start=1):
        table.add_row(str(step), *(f"{reward:.3f}" for reward in rewards))
    table.add_section()
    table.add_row("last 5", *(f"{statistics.mean(rewards[-5:]):.3f}" for rewards in curves.values()))
    table.add_row("seconds", *(f"{seconds[key]:.0f}" for key in curves))
    return table


if __name__ == "__main__":
    main()
