"""Measure what the trainer itself costs, by the number of ranks and of prompts, and print how it grows.

    scripts/bench/scale                    1 to 4,096 ranks, 10,000 to 100,000,000 prompts, the numbers of the README: some 4 minutes
    scripts/bench/scale --quick            few ranks and prompts: shows that everything works; its numbers mean nothing

A process plays a rank of a step that is made up, and what the main one does besides: 2 prompts and 16 completions a rank, of uneven
lengths. It runs what trains, and finds what the other ranks would have sent; how long a network takes to bring it is not measured here,
nor what its library does for each rank that the main one hears or tells in one exchange, nor are the policy and the sampling. Every
rank has an engine of its own. The sampler draws from a dataset that repeats its rows. The sizes take turns, and medians are compared
with 1 rank and with 10,000 prompts.
"""

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import disable_progress_bars
from rich.console import Console

from bench.compare import processor
from bench.measure import resident_bytes
from bench.scale_rank import MAIN_STAGES, RANK_PARTS, RANK_STAGES, REWARDED_STAGES, SCORING_STAGES
from bench.scale_report import exchanges_table, main_table, prompts_table, ranks_table, scoring_table
from bench.scale_step import (
    COMPLETION_TOKENS,
    NUM_GENERATIONS,
    PROMPTS_PER_RANK,
    prompt_builder,
    prompt_rows,
)
from bench.scale_worker import timed
from bench.worker import Worker
from grpo_cli.data.preflight import preflight
from grpo_cli.data.sampler import PromptSampler

RANKS = (1, 16, 256, 4096)
PROMPTS = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
QUICK_RANKS = (1, 4)
QUICK_PROMPTS = (100, 1000)
PROMPTS_DRAWN = 16
RESUMED_AFTER = 0.7
"""Share of an epoch."""

SAMPLER = ("start", "first draw", "later draw", "checkpoint", "resume", "resumed draw")

Times = dict[str, dict[int, list[float]]]
"""By what was measured, then by number of ranks or prompts, the seconds of each turn."""

Exchanges = dict[str, dict[int, tuple[int, ...]]]
"""By stage, then by number of ranks, how often a rank exchanges something, and the bytes that it gets."""

T = TypeVar("T")


def main() -> int:
    """Run the measurements."""
    arguments = _arguments()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    disable_progress_bars()
    console = Console(width=None if sys.stdout.isatty() else 160)
    prompts, held_bytes = _measure_prompts(arguments.prompts, arguments.repeats)
    console.print(prompts_table(prompts, held_bytes))
    ranks, exchanges = _measure_ranks(arguments.ranks, arguments.repeats)
    console.print(ranks_table(*({name: ranks[name] for name in names} for names in (RANK_STAGES, RANK_PARTS))))
    console.print(main_table({name: ranks[name] for name in MAIN_STAGES}))
    console.print(
        scoring_table(*({name: ranks[name] for name in names} for names in (SCORING_STAGES, REWARDED_STAGES)))
    )
    console.print(exchanges_table(exchanges))
    conditions = _conditions()
    console.print(", ".join(f"{name} {value}" for name, value in conditions.items()), highlight=False, soft_wrap=True)
    if arguments.json is not None:
        record = {**conditions, "ranks": ranks, "exchanges": exchanges, "prompts": prompts, "held_bytes": held_bytes}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    """Read the command line."""
    summary, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="scripts/bench/scale",
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", metavar="COUNT", help="1 16 256 4096; the first is the baseline"
    )
    parser.add_argument("--prompts", type=int, nargs="+", metavar="COUNT", help="10000 to 100000000, in the same way")
    parser.add_argument("--repeats", type=int, help="turns of each; 5")
    parser.add_argument("--quick", action="store_true", help="few ranks and prompts, and one turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    arguments = parser.parse_args()
    arguments.ranks = arguments.ranks or (QUICK_RANKS if arguments.quick else RANKS)
    arguments.prompts = arguments.prompts or (QUICK_PROMPTS if arguments.quick else PROMPTS)
    arguments.repeats = arguments.repeats or (1 if arguments.quick else 5)
    if min(*arguments.ranks, *arguments.prompts, arguments.repeats) < 1:
        parser.error("--ranks, --prompts, --repeats: at least 1")
    if sys.platform != "linux":
        parser.error("memory is measured as Linux tells it")
    return arguments


def _measure_ranks(counts: Sequence[int], repeats: int) -> tuple[Times, Exchanges]:
    """Measure every stage with every number of ranks, in turns; and count what a rank exchanges in each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    names = (*RANK_STAGES, *RANK_PARTS, *REWARDED_STAGES, *MAIN_STAGES, *SCORING_STAGES)
    times: Times = {name: {count: [] for count in counts} for name in names}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        workers = {}
        for count in counts:
            command = [sys.executable, "-P", "-m", "bench.scale_worker"]
            workers[count] = Worker(command, environment=environment, log=folder / f"{count}.log")
            stack.callback(workers[count].close)
            workers[count].ask("load", count=count)
        for _ in range(repeats):
            for count, worker in workers.items():
                for name, seconds in worker.ask("turn").items():
                    times[name][count].append(seconds)
        told = {count: worker.ask("exchanges") for count, worker in workers.items()}
    return times, {name: {count: tuple(told[count][name]) for count in counts} for name in RANK_STAGES}


def _measure_prompts(counts: Sequence[int], repeats: int) -> tuple[Times, dict[int, int]]:
    """Measure the sampler with every number of prompts, in turns; and the memory that it holds, by number."""
    builder = prompt_builder()
    some = preflight(prompt_rows(min(counts)), builder)
    times: Times = {name: {count: [] for count in counts} for name in SAMPLER}
    held_bytes = {}
    for _ in range(repeats):
        for count in counts:
            rows = prompt_rows(count)
            before = resident_bytes()
            # As a preflight of so many rows gives them: all are usable.
            kept = array("q")
            kept.frombytes(np.arange(count).data.cast("B"))
            start = partial(PromptSampler, rows, builder, replace(some, kept=kept), seed=0, shuffle=True)
            sampler = _measure_sampler(start, {name: times[name][count] for name in SAMPLER})
            held_bytes[count] = resident_bytes() - before
            del sampler, start, kept
    return times, held_bytes


def _measure_sampler(start: Callable[[], PromptSampler], times: dict[str, list[float]]) -> PromptSampler:
    """Measure a sampler that starts, draws, and is resumed; give the one that was resumed."""

    def measured(name: str, call: Callable[[], T]) -> T:
        seconds, result = timed(call)
        times[name].append(seconds)
        return result

    sampler = measured("start", start)
    measured("first draw", partial(sampler.take, PROMPTS_DRAWN))
    measured("later draw", partial(sampler.take, PROMPTS_DRAWN))
    state = measured("checkpoint", lambda: json.dumps(sampler.state_dict()))
    place = {**json.loads(state), "drawn": int(RESUMED_AFTER * sampler.rows_per_epoch)}
    resumed = start()
    measured("resume", partial(resumed.load_state_dict, place))
    measured("resumed draw", partial(resumed.take, PROMPTS_DRAWN))
    return resumed


def _conditions() -> dict[str, Any]:
    """Say what was measured where."""
    packages = ("grpo-cli", "torch", "datasets", "tokenizers")
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        **{name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "processor": processor(),
        "prompts a rank": PROMPTS_PER_RANK,
        "completions a prompt": NUM_GENERATIONS,
        "tokens a completion": COMPLETION_TOKENS,
    }


if __name__ == "__main__":
    sys.exit(main())
