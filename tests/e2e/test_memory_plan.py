"""What `grpo plan` says of memory, against the peaks of real runs on CPUs."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from e2e.experiment import Experiment, make_experiment, records
from many_processes import Job, overrides, train_in_forked
from tiny_models import build_tiny_model
from warm_start import WarmStart

from grpo_cli.planning.machine import SPEEDS, Machine
from grpo_cli.planning.plan import TrainingPlan, plan_training
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

WITHIN = 0.2

FREED_AT_ONCE = "import ctypes; ctypes.CDLL(None).mallopt(-3, 65536)\n"
"""M_MMAP_THRESHOLD: otherwise the C library keeps what was freed for later, which is a third more at times."""

SMALL_BUFFERS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 1_000_000,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "reduce_bucket_size": 500_000,
}
"""DeepSpeed's own are larger than this model."""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Experiment:
    """Of a model that is large beside what else a process holds."""
    folder = tmp_path_factory.mktemp("experiment")
    made = make_experiment(
        folder,
        build_tiny_model(
            folder / "model", hidden_size=512, num_layers=8, intermediate_size=1536, initializer_range=0.02
        ),
        grpo={"num_generations": 8},
        generation={"max_completion_length": 56, "min_completion_length": 56},
        train={"prompts_per_step": 2, "max_steps": 2, "learning_rate": 1e-6, "micro_batch_tokens": 1024},
        dataset={"max_prompt_length": 64},
    )
    rows = [{"prompt": "words of a prompt, " * 3 + f"{number:02} "} for number in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "zero.json").write_text(json.dumps({"zero_optimization": SMALL_BUFFERS}))
    (folder / "small").symlink_to(tiny_model_folder)
    return made


def measured(warm: WarmStart, experiment: Experiment, count: int, changes: Mapping[str, object]) -> list[float]:
    """Bytes on top of what a process has that trains next to nothing: the least and the most of a process."""
    few = {"model.name_or_path": experiment.folder / "small", "generation.max_completion_length": 4}
    outputs = [experiment.output(str(number)) for number in range(2)]
    jobs: list[Job] = [
        (
            experiment.recipe,
            {**changes, **smaller, "train.output_dir": output, "train.overwrite_output_dir": True},
            None,
        )
        for output, smaller in zip(outputs, ({**few, "generation.min_completion_length": 0}, {}), strict=True)
    ]
    train_in_forked(warm, count, jobs, before=FREED_AT_ONCE)
    nothing, last = (records(output)[-1] for output in outputs)
    return [last[f"memory/peak/{one}"] - nothing[f"memory/peak/{one}"] for one in ("min", "max")]


def planned(experiment: Experiment, count: int, changes: Mapping[str, object]) -> TrainingPlan:
    loaded = load_recipe(experiment.recipe, overrides(changes))
    machine = Machine(device=torch.device("cpu"), processes=count, memory=16 << 30, speed=SPEEDS["cpu"])
    return plan_training(loaded.recipe, folder=loaded.folder, machine=machine)


NOTHING_AGAIN: dict[str, object] = {"train.gradient_checkpointing": False}
ZERO: dict[str, object] = {"distributed.strategy": "deepspeed_zero3", "distributed.deepspeed_config": "zero.json"}
SHORT: dict[str, object] = {"generation.max_completion_length": 12, "generation.min_completion_length": 12}
"""Each token takes all weights together anew, and adds next to nothing to what that needs."""
CASES: dict[str, tuple[int, dict[str, object], str]] = {
    "alone": (1, {}, "training"),
    "fsdp2": (2, {"distributed.strategy": "fsdp2", **NOTHING_AGAIN}, "training"),
    "zero3": (2, {**ZERO, **SHORT}, "sampling"),
}
"""Processes, changes, and when most is needed."""


@pytest.mark.parametrize("case", CASES)
def test_processes_need_what_is_planned(warm: WarmStart, experiment: Experiment, case: str) -> None:
    count, changes, when = CASES[case]
    memory = planned(experiment, count, changes).memory
    assert memory.total == getattr(memory, when)
    for needed in measured(warm, experiment, count, changes):
        assert needed == pytest.approx(memory.total, rel=WITHIN), memory
