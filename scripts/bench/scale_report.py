"""What the measurements of `scripts/bench/scale` say: a table by ranks, and one by prompts."""

import statistics
from collections.abc import Mapping, Sequence

from rich.table import Table

TOTAL = "together"
MEBIBYTE = 2**20

Seconds = Mapping[str, Mapping[int, Sequence[float]]]
"""By stage, then by number of ranks or prompts, what each repetition took."""


def medians(measured: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Give the median of the repetitions; without any there was nothing to do."""
    return {size: statistics.median(times) if times else 0.0 for size, times in measured.items()}


def ranks_table(stages: Seconds, parts: Seconds) -> Table:
    """Draw the table of any rank but the main one. The first number of ranks is the baseline."""
    base, most, repeats = _shape(stages)
    table = _table(
        "A rank's time around the model, ms a step",
        f"Medians of {repeats}, processor time of one thread, without network, policy and sampling. With {most:,} ranks the step is "
        f"{most // base:,} times as large as with {base:,}; `times` is 1.00 for what takes a rank no longer then. The indented parts are in "
        "the line above them.",
        ["stage", *_columns(stages)],
    )
    indented = {f"  {name}": medians(measured) for name, measured in parts.items()}
    _add_stages(table, stages, indented)
    return table


def main_table(stages: Seconds) -> Table:
    """Draw the table of what the main rank does besides, in the same way."""
    table = _table(
        "What the main rank does besides, ms a step",
        "It writes the completions of the first prompts only (`logging.num_completions_to_log`), and none where `logging.log_completions` "
        "is false; to cut shares it needs some numbers of each.",
        ["stage", *_columns(stages)],
    )
    _add_stages(table, stages, {})
    return table


def scoring_table(stages: Seconds, rewarded: Seconds) -> Table:
    """Draw the table of what the main rank does besides where reward functions see all completions of a step."""
    table = _table(
        "What the main rank does besides that, ms a step, where reward functions see all completions",
        "Without `rewards.spread`. Any other rank gets its rewards from there then, which is the last line.",
        ["stage", *_columns(stages)],
    )
    _add_stages(table, stages, {name: medians(measured) for name, measured in rewarded.items()})
    return table


def exchanges_table(exchanges: Mapping[str, Mapping[int, Sequence[int]]]) -> Table:
    """Draw the table of how often a rank waits for others, and what it gets then."""
    sizes = list(next(iter(exchanges.values())))
    table = _table(
        "Exchanges of a rank, and KiB that it gets in them",
        "Each is one wait for the slowest and the network, whose time is not measured here.",
        ["stage", *map(_ranks, sizes)],
    )
    for name, told in exchanges.items():
        table.add_row(name, *(f"{told[size][0]}, {told[size][1] / 1024:,.1f} KiB" for size in sizes))
    return table


def _shape(stages: Seconds) -> tuple[int, int, int]:
    """Give the baseline, the largest size, and the number of repetitions."""
    measured = next(iter(stages.values()))
    sizes = list(measured)
    return sizes[0], sizes[-1], len(measured[sizes[0]])


def _columns(stages: Seconds) -> list[str]:
    sizes = list(next(iter(stages.values())))
    return [*(_ranks(size) for size in sizes), f"times {_ranks(sizes[0])}", f"per rank, times {_ranks(sizes[0])}"]


def _add_stages(table: Table, stages: Seconds, indented: Mapping[str, Mapping[int, float]]) -> None:
    """Add a line for each stage and part, and one for all stages together."""
    rows = {name: medians(measured) for name, measured in stages.items()}
    whole = {size: sum(row[size] for row in rows.values()) for size in next(iter(rows.values()))}
    lines = {**rows, **indented}
    for name, row in {**lines, TOTAL: whole}.items():
        table.add_row(name, *_cells(row, digits=2), end_section=name == [*lines][-1])


def prompts_table(seconds: Seconds, held_bytes: Mapping[int, int]) -> Table:
    """Draw the table by prompts. The first number of prompts is the baseline."""
    sizes = list(held_bytes)
    base = sizes[0]
    table = _table(
        "The sampler's time, ms",
        f"Medians of {len(seconds[next(iter(seconds))][base])}, processor time of one thread. The first draw of an epoch, and the first "
        "after resuming, put its prompts in order. `per prompt` divides by how many more there are.",
        [
            "",
            *(f"{size:,} prompts" for size in sizes),
            f"times {base:,} prompts",
            f"per prompt, times {base:,} prompts",
        ],
    )
    for name, measured in seconds.items():
        table.add_row(name, *_cells(medians(measured), digits=4))
    table.add_row("memory held, MiB", *(f"{held_bytes[size] / MEBIBYTE:,.1f}" for size in sizes), "", "")
    return table


def _cells(row: Mapping[int, float], *, digits: int) -> list[str]:
    """Write milliseconds, and how they grow from the first size to the last: altogether, and for each rank or prompt."""
    sizes = list(row)
    base, most = sizes[0], sizes[-1]
    milliseconds = [f"{1000 * seconds:,.2f}" if seconds else "-" for seconds in row.values()]
    if not row[base]:
        return [*milliseconds, "-", "-"]
    growth = row[most] / row[base]
    return [*milliseconds, f"{growth:,.2f}", f"{growth * base / most:.{digits}f}"]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"


def _table(title: str, caption: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
