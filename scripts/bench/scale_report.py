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
    """Draw the table by ranks. The first number of ranks is the baseline."""
    sizes = list(next(iter(stages.values())))
    base, most = sizes[0], sizes[-1]
    table = _table(
        "A rank's time around the model, ms a step",
        f"Medians of {len(stages[next(iter(stages))][base])}, processor time of one thread, without network, policy and sampling. With "
        f"{most:,} ranks the step is {most // base:,} times as large as with {base:,}: `per rank` divides by that. 1.00 is work that "
        "grows with the step, less is cheaper. The indented parts are in the line above them.",
        ["stage", *(_ranks(size) for size in sizes), f"times {_ranks(base)}", f"per rank, times {_ranks(base)}"],
    )
    rows = {name: medians(measured) for name, measured in stages.items()}
    whole = {size: sum(row[size] for row in rows.values()) for size in sizes}
    indented = {f"  {name}": medians(measured) for name, measured in parts.items()}
    for name, row in {**rows, **indented, TOTAL: whole}.items():
        table.add_row(name, *_cells(row, digits=2), end_section=name == [*indented][-1])
    return table


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
