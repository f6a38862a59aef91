"""Measure what whole runs need that train all weights, adapters, or adapters on quantized weights, and print them side by side.

    scripts/bench/adapters                     the quickstart's model, the numbers of the README: some minutes
    scripts/bench/adapters --recipe RECIPE     another recipe

Each way is a `grpo train` of a few steps in a process of its own. The peak is what the run itself reports, over loading, sampling and
training; where the device has a memory of its own, that of the device.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

_ADAPTERS = ("model.lora.r=16", "model.lora.alpha=32")
WAYS: dict[str, tuple[str, ...]] = {
    "all weights": (),
    "adapters": _ADAPTERS,
    "adapters on 8 bits": (*_ADAPTERS, "model.quantization=8bit"),
    "adapters on 4 bits": (*_ADAPTERS, "model.quantization=4bit", "model.bnb_4bit_use_double_quant=true"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """What a run has needed.

    Attributes:
        peak: Bytes of memory.
        checkpoint: Bytes on disk.
        seconds: Median of a step, without the first.
    """

    peak: int
    checkpoint: int
    seconds: float


def measured(recipe: Path, changes: Sequence[str], *, steps: int) -> Needed:
    """Train a few steps, and read what the run has told."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        settings = (f"train.output_dir={output}", f"train.max_steps={steps}", f"train.save_steps={steps}", *changes)
        subprocess.run(  # noqa: S603  our own command
            [sys.executable, "-m", "grpo_cli", "train", str(recipe), *settings],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        )
        lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        told = [record for record in map(json.loads, lines) if "loss" in record]
        (checkpoint,) = (output / "checkpoints").glob("step-*")
        return Needed(
            peak=int(told[-1]["memory/peak/max"]),
            checkpoint=sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()),
            seconds=statistics.median(record["step_time"] for record in told[1:]),
        )


def main() -> None:
    """Measure all ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps, at least 2")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("changes", nargs="*", help="key=value, for all ways; before them stands --")
    arguments = parser.parse_args()
    table = Table("trained", "peak of memory", "checkpoint", "step")
    for way in arguments.ways:
        found = measured(arguments.recipe, [*WAYS[way], *arguments.changes], steps=arguments.steps)
        sizes = (f"{size / 2**20:,.0f} MiB" for size in (found.peak, found.checkpoint))
        table.add_row(way, *sizes, f"{found.seconds:.1f} s")
    Console().print(table)


if __name__ == "__main__":
    main()
