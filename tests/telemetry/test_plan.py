"""The printed plan, compared as a whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from grpo_cli.telemetry.plan import RunPlan, plan_rows, print_plan

PLAN = RunPlan(
    run_name="quickstart",
    model="package://smollm2/[model]",
    parameters=134_515_008,
    trained_parameters=134_515_008,
    dtype="float32",
    device="cpu",
    dataset="data/prompts.jsonl",
    rows=1200,
    rewards={"length": 1.0, "format": 0.25},
    loss_type="dapo",
    prompts_per_step=4,
    num_generations=8,
    steps_per_generation=1,
    num_iterations=1,
    total_steps=30,
    epochs=0.1,
    longest_prompt=64,
    max_completion_length=48,
    micro_batch_tokens=4096,
    memory={
        "weights": 513 * 2**20,
        "gradients": 513 * 2**20,
        "optimizer": 2**30,
        "reference": 0,
        "activations": 3 * 2**30,
    },
    memory_peak=5 * 2**30,
    memory_available=16 * 2**30,
    output_dir=Path("runs/quickstart"),
)


def test_the_plan_is_one_topic_a_line(plain_console: Console, written: Callable[[], str]) -> None:
    print_plan(plain_console, PLAN)
    assert written() == (
        "quickstart\n"
        "  model     package://smollm2/[model], 134.5M parameters, float32 on cpu\n"
        "  data      data/prompts.jsonl, 1,200 rows\n"
        "  rewards   length x 1, format x 0.25\n"
        "  step      4 prompts x 8 completions = 32 completions, loss dapo\n"
        "  run       30 steps (0.1 epochs), each on new completions\n"
        "  tokens    prompts up to 64, completions up to 48, a step up to 3,584, micro-batches of 4,096 tokens\n"
        "  memory    about 5.0 GiB at most (weights 513.0 MiB, gradients 513.0 MiB, optimizer 1.0 GiB, activations 3.0 GiB), "
        "cpu has 16.0 GiB\n"
        "  output    runs/quickstart\n"
    )


def test_reused_generations_resumed_steps_and_tight_memory_are_told() -> None:
    plan = replace(
        PLAN,
        trained_parameters=2_000_000,
        rows=None,
        epochs=None,
        longest_prompt=None,
        steps_per_generation=4,
        num_iterations=2,
        done_steps=12,
        automatic_micro_batches=True,
        memory_available=2**30,
    )
    rows = dict(plan_rows(plan))
    assert rows["model"] == "package://smollm2/[model], 134.5M parameters (2.0M trained), float32 on cpu"
    assert rows["data"] == "data/prompts.jsonl, streaming"
    assert rows["run"] == "30 steps, 12 done, 8 per generation of 16 prompts (4 steps x 2 iterations)"
    assert rows["tokens"] == "completions up to 48, micro-batches of 4,096 tokens (automatic)"
    assert rows["memory"].endswith("cpu has 1.0 GiB: this may not fit")


def test_an_engine_other_than_the_built_in_one_is_told() -> None:
    assert "engine" not in dict(plan_rows(PLAN))
    rows = plan_rows(replace(PLAN, engine="vLLM in this process"))
    assert rows[:2] == [
        ("model", "package://smollm2/[model], 134.5M parameters, float32 on cpu"),
        ("engine", "vLLM in this process"),
    ]


def test_memory_with_an_unknown_part_is_a_lower_bound() -> None:
    plan = replace(PLAN, memory={"weights": 2**30, "reference": 0, "cache": None}, memory_peak=2**30)
    assert dict(plan_rows(plan))["memory"] == "at least 1.0 GiB (weights 1.0 GiB, cache unknown), cpu has 16.0 GiB"


def test_adapters_are_told_after_the_model() -> None:
    rows = plan_rows(replace(PLAN, adapters="rank 16, alpha 32, on all-linear"))
    assert rows[1] == ("adapters", "rank 16, alpha 32, on all-linear")
    assert [row for row in rows if row[0] != "adapters"] == plan_rows(PLAN)
