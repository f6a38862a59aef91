"""Runs that find no memory: made up above a number of tokens, and real ones under `ulimit -v`."""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.experiment import Experiment, assert_same_run, make_experiment
from tiny_models import build_tiny_model
from warm_start import WarmStart, warm_start

from grpo_cli.engine.run import run
from grpo_cli.engine.trainer import Trainer
from grpo_cli.errors import Interrupted, TrainingError
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.recipe.load import load_recipe
from grpo_cli.types import Segment, TokenStats

MIB = 2**20


def train(experiment: Experiment, output: str, *changes: str, resume: str | None = None) -> None:
    where = f"train.output_dir={experiment.output(output)}"
    run(load_recipe(experiment.recipe, [where, *changes]), resume=resume)


class SmallMemory:
    """Lets forwards of the training policy fail above a number of tokens.

    Attributes:
        most: Tokens that fit.
        failures: Forwards that failed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, most: int) -> None:
        self.most = most
        self.failures = 0
        forward = PolicyModel.forward

        def limited(policy: PolicyModel, segments: tuple[Segment, ...], **arguments: Any) -> TokenStats:
            stats = forward(policy, segments, **arguments)
            if torch.is_grad_enabled() and stats.tokens_computed > self.most:
                self.failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return stats

        monkeypatch.setattr(PolicyModel, "forward", limited)


@pytest.fixture
def experiment(tiny_model_folder: Path, tmp_path: Path) -> Experiment:
    return make_experiment(
        tmp_path,
        tiny_model_folder,
        grpo={"num_generations": 4, "steps_per_generation": 2, "num_iterations": 2},
        generation={"max_completion_length": 12},
    )


def automatic(experiment: Experiment) -> None:
    """Let the recipe leave the budget open."""
    text = experiment.recipe.read_text()
    experiment.recipe.write_text(re.sub(r"\n *micro_batch_tokens: 32", "", text))


def test_a_run_goes_on_with_the_lower_budget_and_a_resumed_one_begins_with_it(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as memory allows what it allowed, that is the same run, bit for bit."""
    automatic(experiment)
    memory = SmallMemory(monkeypatch, most=60)
    train(experiment, "whole")
    told = capsys.readouterr().out
    assert "micro-batches of 1,024 tokens (automatic)" in told
    (lowered,) = re.findall(r"out of memory with a micro-batch of [\d,]+ tokens: .* they have ([\d,]+) at most", told)
    assert memory.failures == 1, "not once a step"

    whole = Trainer._train_step

    def stop_after_two(self: Trainer) -> None:
        whole(self)
        if self.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", stop_after_two)
        with pytest.raises(Interrupted):
            train(experiment, "stopped")
    assert memory.failures == 2
    capsys.readouterr()
    train(experiment, "stopped", resume="newest")
    assert memory.failures == 2
    assert f"micro-batches of {lowered} tokens (automatic)" in capsys.readouterr().out
    assert_same_run(experiment.output("stopped"), experiment.output("whole"))


def test_where_no_completion_fits_the_run_ends_with_what_it_has(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Trainer._train_step
    memory = SmallMemory(monkeypatch, most=1000)

    def less_memory_after_two(self: Trainer) -> None:
        memory.most = 1000 if self.state.step < 2 else 3
        whole(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", less_memory_after_two)
        with pytest.raises(TrainingError, match=r"a single completion, about \d+ tokens with its prompt, does not fit"):
            train(experiment, "stopped")
    memory.most = 1000
    train(experiment, "stopped", resume="newest")
    train(experiment, "whole")
    assert_same_run(experiment.output("stopped"), experiment.output("whole"))


COMMAND = """
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from grpo_cli.cli.app import main
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
try:
    main()
finally:
    peak = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPeak")]
    print(peak[0], file=sys.stderr)
"""
"""Runs the command, and says how much address space it took at most."""


@pytest.fixture
def warm_frugal() -> Iterator[WarmStart]:
    """Large blocks go back to the system as soon as they are free: what is counted is what is held, and not a heap's holes."""
    blocks = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    with warm_start(environment={**os.environ, **blocks, "OMP_NUM_THREADS": "1"}) as start:
        yield start


def command(
    warm: WarmStart, experiment: Experiment, *changes: str, address_space: int = resource.RLIM_INFINITY
) -> tuple[str, int]:
    """Run `grpo train` in a process of its own and give what it printed, and its largest address space in bytes."""
    done = warm.run("train", experiment.recipe, *changes, program=COMMAND.format(limit=address_space), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    peak = re.search(r"VmPeak:\s+(\d+) kB", done.stderr)
    assert peak is not None
    return done.stdout, int(peak[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
def test_a_run_under_ulimit_finds_what_fits(tmp_path: Path, warm_frugal: WarmStart) -> None:
    """A step of 16 prompts of 450 tokens. One at a time fits into the limit by construction, and all at once do not.

    The run that is told to take all at once comes down to what fits, and is then the run that was told so; the one that is told
    nothing sees the limit, and does not even try.
    """
    model = build_tiny_model(tmp_path / "model", hidden_size=256, num_layers=8)
    rows = [{"prompt": f"{number} " * 150} for number in range(10, 26)]
    experiment = make_experiment(
        tmp_path,
        model,
        rewards={"reward_funcs": ["my_rewards.few_letters"]},
        train={"prompts_per_step": 16, "max_steps": 1, "gradient_checkpointing": False},
        generation={"max_completion_length": 4, "max_num_seqs": 2},
    )
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    told, needed = command(
        warm_frugal, experiment, "train.micro_batch_tokens=100", f"train.output_dir={tmp_path / 'small'}"
    )
    assert "out of memory" not in told
    all_at_once = "train.micro_batch_tokens=100000"
    told, peak = command(warm_frugal, experiment, all_at_once, f"train.output_dir={tmp_path / 'free'}")
    assert "out of memory" not in told
    assert peak > needed + 200 * MIB, "the construction has no room between too little and enough"
    limit = needed + (peak - needed) // 2

    told, _ = command(
        warm_frugal, experiment, all_at_once, f"train.output_dir={tmp_path / 'limited'}", address_space=limit
    )
    lowered = re.findall(r"out of memory with a micro-batch of [\d,]+ tokens: .* they have ([\d,]+) at most", told)
    straight = f"train.micro_batch_tokens={lowered[-1].replace(',', '')}"
    command(warm_frugal, experiment, straight, f"train.output_dir={tmp_path / 'straight'}")
    assert_same_run(tmp_path / "limited", tmp_path / "straight")

    automatic(experiment)
    told, _ = command(warm_frugal, experiment, f"train.output_dir={tmp_path / 'automatic'}", address_space=limit)
    assert "out of memory" not in told
    assert re.search(r"micro-batches of (64|128|256|512) tokens \(automatic\)", told), told
