"""The benchmark, from end to end on a tiny model, and what its tables are computed from.

TRL takes part where `scripts/bench/run` has installed it.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_models import build_tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from bench.arithmetic import FORWARDS, ModelSize, forward_operations, seen_tokens
from bench.compare import TRL_PYTHON, main
from bench.grpo_worker import ForcedLengths
from bench.measure import Cost, Meter
from bench.report import ShapeResult, gradient_difference, median_parts, shape_table, with_head_everywhere
from bench.workload import PROMPT_SPREAD, Workload, make_workload

SCRIPTS = Path(__file__).parents[2] / "scripts"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")


@pytest.fixture(scope="module")
def workload(tiny_model_folder: Path) -> Workload:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    return make_workload(tokenizer, prompt_tokens=20, num_generations=4, completion_tokens=(3, 12))


@pytest.fixture
def compare(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[str, dict[str, Any]]]]:
    """The benchmark; a call gives what it prints and what it writes."""
    verbosity = transformers_logging.get_verbosity()
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))

    def call(*arguments: str) -> tuple[str, dict[str, Any]]:
        record = tmp_path / "record.json"
        quick = ["--quick", "--threads", "1", "--json", str(record)]
        monkeypatch.setattr(sys, "argv", ["compare", *quick, *arguments])
        assert main() == 0
        return capsys.readouterr().out, json.loads(record.read_text(encoding="utf-8"))

    yield call
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()


@pytest.mark.slow
def test_our_side_runs_and_measures_every_part(tiny_model_folder: Path, compare: Any) -> None:
    printed, record = compare("--model", str(tiny_model_folder), "--without-trl")
    (shape,) = record["shapes"]
    workload = Workload(**shape["workload"])
    assert len(shape["steps"]["grpo"]) == len(shape["steps"]["grpo_recomputing"]) == 2
    for step in shape["steps"]["grpo"] + shape["steps"]["grpo_recomputing"]:
        assert set(FORWARDS) <= set(step["parts"])
        together = sum(step["parts"][part]["cpu_seconds"] for part in FORWARDS if part != "whole_step")
        assert 0 < together <= step["parts"]["whole_step"]["cpu_seconds"]
        assert step["tokens_useful"] == workload.unique_tokens
        assert step["gradient_norm"] > 0
    assert gradient_difference(ShapeResult(**{**shape, "workload": workload})) == 0
    assert all(part in printed for part in FORWARDS)


@pytest.mark.slow
@pytest.mark.skipif(not TRL_PYTHON.exists(), reason="TRL is installed by scripts/bench/run only")
def test_trl_comes_to_the_same_gradient_from_more_tokens(tiny_model_folder: Path, compare: Any) -> None:
    _, record = compare("--model", str(tiny_model_folder), "--head-micro-batches", "4")
    (shape,) = record["shapes"]
    workload = Workload(**shape["workload"])
    ours, theirs = shape["steps"]["grpo"][0], shape["steps"]["trl"][0]
    assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
    longest = max(len(ids) for ids in workload.prompt_ids) + workload.longest_completion
    assert theirs["tokens_computed"] == len(workload.rows) * longest
    each = len(workload.completion_ids[0])
    assert theirs["tokens_useful"] == each * sum(map(len, workload.prompt_ids)) + workload.completion_tokens
    (everywhere,) = shape["steps"]["trl_all_positions"]
    assert everywhere["micro_batches"] == everywhere["of"] == 4


def test_a_workload_has_the_lengths_it_is_asked_for(workload: Workload, tiny_model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    assert [len(ids) for ids in workload.prompt_ids] == [round(20 * share) for share in PROMPT_SPREAD]
    assert tokenizer(workload.prompts)["input_ids"] == workload.prompt_ids
    lengths = [len(ids) for ids in workload.rows]
    assert len(lengths) == 16
    assert min(lengths) >= 3
    assert lengths[0] == max(lengths) == 12
    assert len(set(lengths)) > 3
    for ids in workload.rows:
        assert tokenizer.eos_token_id not in ids[:-1]
        assert (ids[-1] == tokenizer.eos_token_id) is (len(ids) < 12)


def test_unique_tokens_and_what_they_see_are_those_of_every_prefix_once(workload: Workload) -> None:
    prefixes: set[tuple[int, int | None, int]] = set()
    for number, (prompt, group) in enumerate(zip(workload.prompt_ids, workload.completion_ids, strict=True)):
        prefixes |= {(number, None, end) for end in range(1, len(prompt) + 1)}
        for row, ids in enumerate(group):
            prefixes |= {(number, row, len(prompt) + end) for end in range(1, len(ids))}
    assert workload.unique_tokens == len(prefixes)
    assert seen_tokens(workload) == sum(end for _, _, end in prefixes)


@pytest.mark.parametrize("tied", [True, False])
def test_the_arithmetic_of_one_token_is_what_torch_counts(tmp_path: Path, *, tied: bool) -> None:
    """With one token every matrix is used once and causality leaves nothing out, so torch's own counter must agree."""
    folder = build_tiny_model(tmp_path / "model", tied=tied, num_layers=3)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.tensor([[5]]))
    one = Workload(prompts=["a"], prompt_ids=[[5]], completion_ids=[[[7]]])
    assert forward_operations(ModelSize.of(str(folder)), one) == counter.get_total_flops()


def test_completions_end_at_their_lengths_however_rows_are_ordered() -> None:
    """Rows change places, join late and begin alike; each length is still used once."""
    lengths = [3, 1, 2, 4]
    stops = ForcedLengths(lengths)
    rows = [[7], [7], [8]]
    ended: list[int] = []
    late = [[7]]
    while rows:
        going = []
        for row, end in zip(rows, stops.ended(rows), strict=True):
            if end:
                ended.append(len(row))
            else:
                going.append([*row, len(row) % 2])
        rows = [*reversed(going), *late]
        late = []
    assert sorted(ended) == sorted(lengths)


def test_a_part_within_a_part_counts_in_both_and_memory_is_the_highest() -> None:
    meter = Meter()
    with meter.part("outer"):
        with meter.part("inner"):
            ballast = bytearray(b"x" * 50_000_000)
            time.sleep(0.02)
        del ballast
        with meter.part("later"):
            time.sleep(0.01)
        with meter.part("later"):
            time.sleep(0.01)
    outer, inner, later = (meter.parts[name] for name in ("outer", "inner", "later"))
    assert outer.wall_seconds >= inner.wall_seconds + later.wall_seconds >= 0.04
    assert later.wall_seconds >= 0.02
    assert outer.peak_bytes == inner.peak_bytes
    assert inner.peak_bytes - later.peak_bytes > 40_000_000


def cost(cpu: float, peak: int = 0) -> Cost:
    return Cost(cpu_seconds=cpu, wall_seconds=cpu / 2, peak_bytes=peak)


def test_the_head_everywhere_replaces_its_parts_and_changes_the_sum() -> None:
    whole = {"generate": cost(5), "reference": cost(2, 10), "train_step": cost(6, 20), "whole_step": cost(14, 20)}
    everywhere = with_head_everywhere(whole, {"reference": cost(1, 15), "train_step": cost(3, 30)}, share=0.25)
    assert everywhere["reference"] == cost(4, 15)
    assert everywhere["train_step"] == cost(12, 30)
    assert everywhere["whole_step"] == cost(14 - 2 + 4 - 6 + 12, 30)
    assert everywhere["generate"] == whole["generate"]


def test_the_table_shows_medians_ratios_and_shares(workload: Workload) -> None:
    """Every number in the rows of a table is computed by hand from costs that were chosen for it."""

    def step(scale: float, norm: float = 2.0) -> dict[str, Any]:
        parts = {part: dataclasses.asdict(cost(scale * factor, 3 * 2**20)) for part, factor in FORWARDS.items()}
        return {"parts": parts, "gradient_norm": norm, "tokens_computed": 1, "tokens_useful": 1}

    sample = {"parts": {"train_step": dataclasses.asdict(cost(9.0, 5 * 2**20))}, "micro_batches": 1, "of": 4}
    size = ModelSize(body_parameters=1000, vocabulary=50, hidden=8, attention_width=8, layers=2)
    needed = forward_operations(size, workload)
    result = ShapeResult(
        prompt_tokens=20,
        workload=workload,
        rates={"slow": {"cpu": 1.0, "wall": 1.0}, "fast": {"cpu": needed, "wall": needed}},
        level_bytes={"grpo": 2**20, "trl": 2**20},
        trained_bytes=2**20,
        steps={
            "grpo": [step(2), step(100), step(1)],
            "grpo_recomputing": [step(4)],
            "trl": [step(8, norm=1.0)],
            "trl_all_positions": [sample],
        },
    )
    assert gradient_difference(result) == 0.5
    assert median_parts(result.steps["grpo"])["train_step"] == cost(6, 3 * 2**20)
    console = Console(width=180)
    with console.capture() as captured:
        console.print(shape_table(result, size))
    rows = [" ".join(line.replace("│", " ").split()) for line in captured.get().splitlines()]
    assert "train_step 6.0 / 3.0 24.0 / 12.0 4.00 / 4.00 50 / 100 % 12 / 25 % 2 2 1.00 0.00" in rows
    assert "train_step 6.0 / 3.0 36.0 / 18.0 6.00 / 6.00 50 / 100 % 8 / 17 % 2 4 0.50 0.00" in rows
    assert "train_step 12.0 / 6.0 24.0 / 12.0 2.00 / 2.00 25 / 50 % 12 / 25 % 2 2 1.00 0.00" in rows
