"""Measure what training all weights needs, adapters, and adapters on quantized weights, and print them side by side.

    scripts/bench/adapters                                       the quickstart's model and its recipe
    scripts/bench/adapters --recipe RECIPE                       another recipe
    scripts/bench/adapters -- train.micro_batch_tokens=64        with a change to it

Each way is a process of its own, with the stages of a real run. Memory is told by what it is for: weights, as they are after loading;
what is kept from step to step beside them, which are gradients and the optimizer's moments, and what a rollout engine keeps; what the
largest step takes on top, which are activations above all. And the most while loading, which is over before there is anything else. On
a GPU that is what its tensors take, else resident memory beyond that of Python and its libraries.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.worker import Worker

_ADAPTERS = ("model.lora.r=16", "model.lora.alpha=32")
WAYS: dict[str, tuple[str, ...]] = {
    "all weights": (),
    "adapters": _ADAPTERS,
    "adapters on 8 bits": (*_ADAPTERS, "model.quantization=8bit"),
    "adapters on 4 bits": (*_ADAPTERS, "model.quantization=4bit", "model.bnb_4bit_use_double_quant=true"),
}
COLUMNS = {
    "weights": "weights",
    "kept": "kept beside them",
    "step": "a step on top",
    "loading": "most while loading",
    "checkpoint": "checkpoint",
}


def measured(recipe: Path, changes: Sequence[str], *, steps: int) -> Mapping[str, float]:
    """Measure one way in a process of its own. See `adapter_worker.needed`."""
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(
            [sys.executable, "-P", "-m", "bench.adapter_worker"],
            environment=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            log=Path(folder) / "log",
        )
        try:
            found: Mapping[str, float] = worker.ask("needed", recipe=str(recipe), changes=list(changes), steps=steps)
            return found
        finally:
            worker.close()


def main() -> None:
    """Measure all ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps, at least 2")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("changes", nargs="*", help="key=value, for all ways; before them stands --")
    arguments = parser.parse_args()
    table = Table("trained", *COLUMNS.values(), "step")
    for way in arguments.ways:
        found = measured(arguments.recipe, [*WAYS[way], *arguments.changes], steps=arguments.steps)
        sizes = (f"{found[name] / 2**20:,.0f} MiB" for name in COLUMNS)
        table.add_row(way, *sizes, f"{found['seconds']:.1f} s")
    Console().print(table)


if __name__ == "__main__":
    main()
