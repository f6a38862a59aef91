"""The benchmark of the engines that sample: from end to end on a tiny model, and what its table is computed from."""

import dataclasses
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM

from bench import rollout_compare
from bench.measure import Cost
from bench.rollout_report import ShapeTurns, median_cost, rollout_table
from bench.rollout_worker import TreeMeter

SCRIPTS = Path(__file__).parents[2] / "scripts"
VLLM = find_spec("vllm")
BURN = "import time\nwhile time.process_time() < 0.5: pass\n"


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None or VLLM.origin is None, reason="vLLM is not installed")
def test_every_engine_takes_its_turns_with_all_weights_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_tiny_model(tmp_path / "model", hidden_size=128, num_layers=3)
    record = tmp_path / "record.json"
    options = ["--quick", "--threads", "1", "--repeats", "2", "--model", str(model), "--json", str(record)]
    monkeypatch.setattr(sys, "argv", ["rollout_compare", *options])
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    before = set(psutil.Process().children(recursive=True))
    assert rollout_compare.main() == 0
    assert set(psutil.Process().children(recursive=True)) <= before
    (shape,) = json.loads(record.read_text(encoding="utf-8"))["shapes"]
    turns = shape["turns"]
    assert {engine: len(taken) for engine, taken in turns.items()} == {"local": 3, "colocate": 2, "server": 2}
    for taken in turns.values():
        assert all(turn["parts"]["generate"]["cpu_seconds"] > 0 for turn in taken)
    two_layers = AutoModelForCausalLM.from_pretrained(model, num_hidden_layers=2)
    size = sum(4 * weight.numel() for weight in two_layers.parameters())
    sent = {engine: {turn["sync_bytes"] for turn in taken} for engine, taken in turns.items()}
    assert sent["local"] == {0}
    for engine in ("colocate", "server"):
        (found,) = sent[engine]
        assert size <= found < size + 16 * 100  # every tensor begins at a multiple of 16 bytes
    printed = capsys.readouterr().out
    order = [line.split(": ")[1] for line in printed.splitlines() if line.startswith("prompts of 24: ")]
    assert order == ["local", "colocate", "server", "local", "colocate", "server", "local"]
    assert "OMP_NUM_THREADS 1, OMP_WAIT_POLICY PASSIVE" in printed


@pytest.mark.skipif(VLLM is not None and VLLM.origin is not None, reason="vLLM is installed")
def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rollout_compare"])
    with pytest.raises(SystemExit):
        rollout_compare.main()
    assert "vLLM is not installed" in capsys.readouterr().err


def test_the_time_of_children_counts_while_they_live_and_after() -> None:
    """One child has a child that ends first and is waited for; another lives on until the part is over."""
    meter = TreeMeter()
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n"
    with subprocess.Popen(
        [sys.executable, "-c", f"{BURN}print(flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as living:
        assert living.stdout is not None
        with meter.part("both"):
            subprocess.run([sys.executable, "-c", nested], check=True)
            living.stdout.readline()
        with meter.part("idle"):
            pass
        living.communicate(b"\n")
    assert meter.parts["both"].cpu_seconds > 0.9
    assert meter.parts["idle"].cpu_seconds < 0.2


def turn(sync: float, generate: float, mebibytes: int = 0) -> dict[str, Any]:
    """A turn whose processor time is twice its wall time."""
    costs = {
        name: Cost(cpu_seconds=2 * seconds, wall_seconds=seconds)
        for name, seconds in (("sync", sync), ("generate", generate))
    }
    parts = {name: dataclasses.asdict(cost) for name, cost in costs.items()}
    return {"parts": parts, "sync_bytes": mebibytes * 2**20}


def test_parts_are_added_before_the_median_is_taken() -> None:
    turns = [turn(1, 10), turn(8, 1), turn(2, 3)]
    assert median_cost(turns, "sync").wall_seconds == 2
    assert median_cost(turns, "generate").wall_seconds == 3
    assert median_cost(turns, "sync", "generate") == Cost(cpu_seconds=18, wall_seconds=9)


def test_the_table_shows_rates_and_ratios_to_the_local_engine() -> None:
    """Every number of the table is computed by hand from costs that were chosen for it."""
    result = ShapeTurns(
        prompt_tokens=64,
        prompts=2,
        completions=12,
        completion_length=10,
        turns={
            "local": [turn(0, 8), turn(0, 10), turn(0, 12)],
            "colocate": [turn(1, 4, 3)],
            "server": [turn(5, 20, 3)],
        },
    )
    console = Console(width=200)
    with console.capture() as captured:
        console.print(rollout_table(result))
    rows = [" ".join(line.replace("│", " ").split()) for line in captured.get().splitlines()]
    assert "local 20.00 / 10.00 0.6 / 1.2 6.0 / 12.0 1.00 / 1.00 0.00 / 0.00 0 20.00 / 10.00 1.00 / 1.00" in rows
    assert "colocate 8.00 / 4.00 1.5 / 3.0 15.0 / 30.0 2.50 / 2.50 2.00 / 1.00 3 10.00 / 5.00 2.00 / 2.00" in rows
    assert "server 40.00 / 20.00 0.3 / 0.6 3.0 / 6.0 0.50 / 0.50 10.00 / 5.00 3 50.00 / 25.00 0.40 / 0.40" in rows
    assert any("turn of local: 50 / 50 %" in row for row in rows)
