"""What the measurements say: one table for each shape."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.arithmetic import FORWARDS, ModelSize, forward_operations
from bench.measure import Cost
from bench.workload import Workload

MEBIBYTE = 2**20
OURS = {"grpo": "by default", "grpo_recomputing": "with gradient_checkpointing: true"}
"""How this project was measured."""


@dataclass(frozen=True, kw_only=True)
class ShapeResult:
    """Everything that was measured at one shape.

    Attributes:
        prompt_tokens: The shape's name.
        workload: What was worked on.
        rates: By library, floating-point operations per second that the machine multiplies matrices with, of `cpu` and `wall` time.
        level_bytes: By side, the memory of libraries and weights.
        trained_bytes: The memory of the policy's weights.
        steps: By `grpo`, `grpo_recomputing`, `trl` and `trl_all_positions` the answers of the measured processes.
    """

    prompt_tokens: int
    workload: Workload
    rates: dict[str, dict[str, float]]
    level_bytes: dict[str, int]
    trained_bytes: int
    steps: dict[str, list[dict[str, Any]]]

    def limit(self, kind: str) -> float:
        """Give the machine's speed, which is that of its fastest library, whichever of them a model uses."""
        return max(rate[kind] for rate in self.rates.values())


def gradient_difference(result: ShapeResult) -> float:
    """Largest relative difference between two gradient norms of a shape; 0 if there is one only."""
    norms = [step["gradient_norm"] for steps in result.steps.values() for step in steps if "gradient_norm" in step]
    return float((max(norms) - min(norms)) / max(norms))


def median_parts(steps: Sequence[dict[str, Any]]) -> dict[str, Cost]:
    """Give the median of each part's time and memory."""
    return {
        part: Cost(
            cpu_seconds=statistics.median(step["parts"][part]["cpu_seconds"] for step in steps),
            wall_seconds=statistics.median(step["parts"][part]["wall_seconds"] for step in steps),
            peak_bytes=round(statistics.median(step["parts"][part]["peak_bytes"] for step in steps)),
        )
        for part in steps[0]["parts"]
    }


def with_head_everywhere(whole: dict[str, Cost], sample: dict[str, Cost], *, share: float) -> dict[str, Cost]:
    """Work out TRL's step with its head on every position from the one without and from a share of its micro-batches.

    Args:
        whole: The parts of a step with the head on completion tokens.
        sample: The reference's and the training part of some micro-batches with the head everywhere.
        share: How many of all micro-batches those are.
    """
    parts = dict(whole)
    for name, cost in sample.items():
        scaled = Cost(
            cpu_seconds=cost.cpu_seconds / share, wall_seconds=cost.wall_seconds / share, peak_bytes=cost.peak_bytes
        )
        before, total = parts[name], parts["whole_step"]
        parts[name] = scaled
        parts["whole_step"] = Cost(
            cpu_seconds=total.cpu_seconds - before.cpu_seconds + scaled.cpu_seconds,
            wall_seconds=total.wall_seconds - before.wall_seconds + scaled.wall_seconds,
            peak_bytes=max(total.peak_bytes, scaled.peak_bytes),
        )
    return parts


def shape_table(result: ShapeResult, size: ModelSize) -> Table:
    """Draw the table of a shape. Times are processor and wall seconds, memory is what comes on top of the weights."""
    workload = result.workload
    table = Table(
        title=f"prompts of about {result.prompt_tokens} tokens: {len(workload.prompts)} prompts, "
        f"{len(workload.rows)} completions of {workload.completion_tokens} tokens",
        caption=_caption(result),
        title_justify="left",
        caption_justify="left",
    )
    for column in (
        "",
        "ours, s",
        "TRL, s",
        "times faster",
        "of the limit",
        "TRL",
        "peak, MiB",
        "TRL",
        "share",
        "without states",
    ):
        table.add_column(column, justify="left" if not column else "right")
    others: dict[str, dict[str, Cost]] = {}
    if "trl" in result.steps:
        compact = median_parts(result.steps["trl"])
        sampled = result.steps["trl_all_positions"]
        share = sampled[0]["micro_batches"] / sampled[0]["of"]
        others["against TRL, GPU head"] = compact
        others["against TRL, CPU head"] = with_head_everywhere(compact, median_parts(sampled), share=share)
    for side, setting in OURS.items():
        mine = median_parts(result.steps[side])
        for name, theirs in others.items() or [("alone", {})]:
            table.add_section()
            table.add_row(f"{name}, {setting}", style="bold")
            for part in FORWARDS:
                table.add_row(part, *_cells(result, size, part, mine[part], theirs.get(part)))
    return table


def _cells(result: ShapeResult, size: ModelSize, part: str, mine: Cost, theirs: Cost | None) -> list[str]:
    """Fill in the row of one part."""
    needed = FORWARDS[part] * forward_operations(size, result.workload)
    states = 3 * result.trained_bytes
    peak = mine.peak_bytes - result.level_bytes["grpo"]
    cells = [_pair(mine.cpu_seconds, mine.wall_seconds, ".1f"), _limit(mine, needed, result), f"{peak / MEBIBYTE:.0f}"]
    if theirs is None:
        return [cells[0], "", "", cells[1], "", cells[2]]
    their_peak = theirs.peak_bytes - result.level_bytes["trl"]
    return [
        cells[0],
        _pair(theirs.cpu_seconds, theirs.wall_seconds, ".1f"),
        _pair(theirs.cpu_seconds / mine.cpu_seconds, theirs.wall_seconds / mine.wall_seconds, ".2f"),
        cells[1],
        _limit(theirs, needed, result),
        cells[2],
        f"{their_peak / MEBIBYTE:.0f}",
        f"{peak / their_peak:.2f}",
        f"{max(peak - states, 0) / max(their_peak - states, 1):.2f}",
    ]


def _limit(cost: Cost, needed: float, result: ShapeResult) -> str:
    """Say how near a part came to the machine's speed at matrix multiplication, in processor and in wall time."""
    cpu = needed / cost.cpu_seconds / result.limit("cpu")
    wall = needed / cost.wall_seconds / result.limit("wall")
    return _pair(100 * cpu, 100 * wall, ".0f") + " %"


def _pair(cpu: float, wall: float, form: str) -> str:
    """Write a number by processor and one by wall time."""
    return f"{cpu:{form}} / {wall:{form}}"


def _caption(result: ShapeResult) -> str:
    """Say what went through the models and whether they agree."""
    fed = "; ".join(
        f"{side} computes {steps[0]['tokens_computed']:.0f}, useful {steps[0]['tokens_useful']:.0f}"
        for side, steps in result.steps.items()
        if "tokens_computed" in steps[0]
    )
    norm = result.steps["grpo"][0]["gradient_norm"]
    rates = "; ".join(
        f"{library} {rate['cpu'] / 1e9:.0f} / {rate['wall'] / 1e9:.0f}" for library, rate in result.rates.items()
    )
    state = 3 * result.trained_bytes / MEBIBYTE
    return (
        f"Times are processor / wall seconds. Peaks come on top of libraries, policy and reference; {state:.0f} MiB of them are "
        f"gradients and optimizer states, which the last column leaves out. {result.workload.unique_tokens} unique tokens in forward and backward; {fed}. Gradient "
        f"norm {norm:.6g}, largest difference {gradient_difference(result):.1e}. GFLOP/s in matrix multiplication: {rates}; the higher is the limit. TRL applies its "
        "head to completion tokens on a GPU and to every position on a CPU."
    )
