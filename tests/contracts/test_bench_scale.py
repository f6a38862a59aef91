"""The benchmark of scale: from end to end on few ranks and prompts, what its tables are computed from, and that its ranks are none but one."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from bench import scale_compare
from bench.scale_rank import MAIN_STAGES, RANK_PARTS, RANK_STAGES, REWARDED_STAGES, SCORING_STAGES, SimulatedStep
from bench.scale_report import TOTAL, main_table, prompts_table, ranks_table
from bench.scale_step import DISTINCT_PROMPTS, PROMPTS_PER_RANK, prompt_builder, prompt_rows
from grpo_cli.data.preflight import preflight
from grpo_cli.data.sampler import PromptSampler
from grpo_cli.engine.collecting import groups_message
from grpo_cli.engine.rewarding import Rewarded
from grpo_cli.engine.step import StepGradient
from grpo_cli.engine.window import RolloutWindow, joined
from grpo_cli.metrics import results

RANKS = 3


def step_of(ranks: int) -> SimulatedStep:
    rows, builder = prompt_rows(PROMPTS_PER_RANK * ranks), prompt_builder()
    sampler = PromptSampler(rows, builder, preflight(rows, builder), seed=0, shuffle=True)
    return SimulatedStep(ranks, sampler, PROMPTS_PER_RANK)


TAKES_SEVERAL = ("merge metrics", "cut shares")
"""What a single rank has no part in."""

SILENT = ("draw prompts", "pass for log-probabilities")
"""Stages in which ranks exchange nothing."""


@pytest.fixture(scope="module")
def step() -> SimulatedStep:
    """Of three ranks."""
    return step_of(RANKS)


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
    stages = (RANK_STAGES, RANK_PARTS, REWARDED_STAGES, MAIN_STAGES, SCORING_STAGES)
    assert list(measured["ranks"]) == [name for each in stages for name in each]
    for name, times in measured["ranks"].items():
        assert name in printed
        assert {count: len(each) for count, each in times.items()} == {"1": int(name not in TAKES_SEVERAL), "4": 1}
    assert list(measured["exchanges"]) == [*RANK_STAGES]
    assert {count for told in measured["exchanges"].values() for count in told} == {"1", "4"}
    assert sum(told["1"][0] for told in measured["exchanges"].values()) == 0, "one rank has nobody to wait for"
    assert all(told["4"][0] > 0 for name, told in measured["exchanges"].items() if name not in SILENT)
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
    rows = lines(main_table({"record": {1: [0.001], 4: [0.008]}}))
    assert "record 1.00 8.00 8.00 2.00" in rows
    rows = lines(prompts_table({"start": {10: [0.001], 100: [0.002]}}, {10: 2**20, 100: 3 * 2**20}))
    assert "start 1.00 2.00 2.00 0.2000" in rows
    assert "memory held, MiB 1.0 3.0" in rows


def test_the_main_rank_comes_to_have_what_the_others_sampled(step: SimulatedStep) -> None:
    rewarded = step.score_all()()
    assert isinstance(rewarded, Rewarded)
    gathered = [one.group for one in rewarded.recorded]
    assert [one.prompt for one in gathered] == step.prompts
    for mine, made in zip(gathered, step.groups, strict=True):
        assert [(one.ids, one.text) for one in mine.completions] == [(one.ids, one.text) for one in made.completions]
        for one, other in zip(mine.completions, made.completions, strict=True):
            assert torch.equal(one.logps, other.logps)


def test_a_rank_gets_the_rewards_of_what_it_sampled(step: SimulatedStep) -> None:
    rewarded = step.get_rewards(1)()
    assert isinstance(rewarded, Rewarded)
    expected = step.scored_of(1)
    assert [one.group.prompt.uid for one in rewarded.own.groups] == [one.group.prompt.uid for one in expected]
    for one, other in zip(rewarded.own.groups, expected, strict=True):
        torch.testing.assert_close(one.rewards, other.rewards, rtol=0, atol=0, equal_nan=True)


def test_every_completion_is_handed_to_one_rank(step: SimulatedStep) -> None:
    shares = [step.hand_out(rank)() for rank in range(RANKS)]
    assert all(isinstance(share, RolloutWindow) for share in shares)
    whole = joined(shares)
    held = [group for rank in range(RANKS) for group in step.held(rank).groups[0]]
    for mine, made in zip(whole.groups[0], held, strict=True):
        assert (mine.uid, mine.prompt_ids, mine.completion_ids) == (made.uid, made.prompt_ids, made.completion_ids)
        assert torch.equal(mine.advantages, made.advantages)
        assert torch.equal(torch.cat(mine.behaviour_logps), torch.cat(made.behaviour_logps))


@pytest.mark.parametrize("ranks", [4, 64])
def test_of_what_others_sampled_a_rank_gets_its_share_and_where_ranks_cut(ranks: int) -> None:
    """That is two numbers of 8 bytes for each rank, none for each completion; the share is as much with any number of ranks."""
    step = step_of(ranks)
    call: Any = step.hand_out(ranks // 2)
    processes = call.args[1].processes
    call()
    assert processes.told_bytes <= 2 * 8 * (ranks + 1) + 200
    assert 0 < processes.sent_bytes < 2 * len(groups_message(step.groups_of(ranks // 2)))


@pytest.mark.parametrize("stage", ["agree on rollouts", "score own completions", "advantages", "pass for the gradient"])
def test_elsewhere_a_rank_gets_as_much_with_any_number_of_ranks(stage: str) -> None:
    found = []
    for ranks in (4, 64):
        step = step_of(ranks)
        call = RANK_STAGES[stage](step, ranks // 2)
        assert call is not None
        before = step.processes.told_bytes
        call()
        found.append((step.processes.told_bytes - before, step.processes.sent_bytes, step.processes.exchanges))
    assert found[0] == found[1]


def test_there_are_as_many_prompts_as_asked_for() -> None:
    assert [len(prompt_rows(count)) for count in (7, DISTINCT_PROMPTS + 7)] == [7, DISTINCT_PROMPTS + 7]


def test_a_rank_computes_its_share(step: SimulatedStep) -> None:
    gradient = step.pass_for_gradient(1)()
    assert isinstance(gradient, StepGradient)
    computed = [ids for group in gradient.share.computed() for ids in group.completion_ids]
    assert sum(map(len, gradient.current)) == sum(map(len, computed)) > 0
    assert results(gradient.metrics)["tokens/useful"] == sum(map(len, computed)), "the others are silent"
