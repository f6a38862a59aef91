"""The benchmark of scale: from end to end on few ranks and prompts, what its tables are computed from, and that its ranks are none but one."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

from bench import scale_compare
from bench.scale_rank import PARTS, STAGES, SimulatedRank
from bench.scale_report import TOTAL, prompts_table, ranks_table
from bench.scale_step import PROMPTS_PER_RANK, prompt_builder, prompt_rows
from grpo_cli.data.preflight import preflight
from grpo_cli.data.sampler import PromptSampler
from grpo_cli.engine.step import StepGradient
from grpo_cli.metrics import results

RANKS = 3


@pytest.fixture(scope="module")
def rank() -> SimulatedRank:
    """The second of three."""
    rows, builder = prompt_rows(PROMPTS_PER_RANK * RANKS), prompt_builder()
    return SimulatedRank(RANKS, PromptSampler(rows, builder, preflight(rows, builder), seed=0, shuffle=True))


def lines(table: Table) -> list[str]:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return [" ".join(line.replace("│", " ").split()) for line in captured.get().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")
def test_every_stage_is_measured_with_every_number_of_ranks_and_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["scale_compare", "--quick", "--json", str(record)])
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert scale_compare.main() == 0
    measured = json.loads(record.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert list(measured["ranks"]) == [*STAGES, *PARTS]
    for name, times in measured["ranks"].items():
        assert name in printed
        assert {count: len(each) for count, each in times.items()} == {"1": int(name != "gather metrics"), "4": 1}
    for name in scale_compare.SAMPLER:
        assert name in printed
        assert list(measured["prompts"][name]) == ["100", "1000"]
    for ratio in ("times 1 rank", "per rank, times 1 rank", "times 100 prompts", "per prompt, times 100 prompts"):
        assert ratio in printed


def test_the_tables_show_medians_and_ratios() -> None:
    """Every number is computed by hand from times that were chosen for it."""
    stages = {"draw": {1: [0.002, 0.001, 0.009], 4: [0.004] * 3}, "balance": {1: [0.001] * 3, 4: [0.012] * 3}}
    parts = {"cut": {1: [0.001] * 3, 4: [0.001] * 3}, "gather": {1: [], 4: [0.003] * 3}}
    rows = lines(ranks_table(stages, parts))
    assert "draw 2.00 4.00 2.00 0.50" in rows
    assert "balance 1.00 12.00 12.00 3.00" in rows
    assert "cut 1.00 1.00 1.00 0.25" in rows
    assert "gather - 3.00 - -" in rows
    assert f"{TOTAL} 3.00 16.00 5.33 1.33" in rows
    rows = lines(prompts_table({"start": {10: [0.001], 100: [0.002]}}, {10: 2**20, 100: 3 * 2**20}))
    assert "start 1.00 2.00 2.00 0.2000" in rows
    assert "memory held, MiB 1.0 3.0" in rows


def test_a_simulated_rank_comes_to_have_what_the_others_sampled(rank: SimulatedRank) -> None:
    gathered = rank.gather_completions()()
    assert [one.prompt for one in gathered] == rank.prompts
    for mine, made in zip(gathered, rank.groups, strict=True):
        assert [(one.ids, one.text) for one in mine.completions] == [(one.ids, one.text) for one in made.completions]
        for one, other in zip(mine.completions, made.completions, strict=True):
            assert torch.equal(one.logps, other.logps)


def test_a_simulated_rank_computes_its_share_and_counts_all(rank: SimulatedRank) -> None:
    """The gradient's metrics are this rank's, and those of the two others over their own prompts."""
    gradient = rank.pass_for_gradient()()
    assert isinstance(gradient, StepGradient)
    share = rank.balance()()
    computed = [tensor for group in share.computed_groups() for tensor in group.behaviour_logps]
    assert sum(map(len, gradient.current)) == sum(map(len, computed))
    others = [group for number, group in enumerate(rank.trained) if number % RANKS != rank.rank]
    active = [[index for index, value in enumerate(group.advantages.tolist()) if value] for group in others]
    expected = sum(
        len(group.completion_ids[index]) for group, indices in zip(others, active, strict=True) for index in indices
    )
    assert results(gradient.metrics)["tokens/useful"] == expected + sum(map(len, computed))
