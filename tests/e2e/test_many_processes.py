"""The same run in one process and in several: the same numbers, the same files, and one voice."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil
import pytest
import torch
from e2e.experiment import WORDS, Experiment, assert_same_run, make_experiment, records, weights
from many_processes import PROGRAM, SMALL, Launched, assert_close, overrides, run_forked, train_in_forked
from tiny_models import build_tiny_model
from tiny_vision_models import build_tiny_vision_model
from vision_prompts import PICTURES
from vllm_server import free_port
from warm_start import WarmStart

from grpo_cli.engine.run import run
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SETTINGS: dict[str, dict[str, object]] = {
    "grpo": {"grpo.loss_type": "grpo"},
    "dr_grpo": {"grpo.loss_type": "dr_grpo"},
    "dapo": {"grpo.loss_type": "dapo"},
    "cispo": {"grpo.loss_type": "cispo", "grpo.epsilon_high": 5},
    "sapo": {"grpo.loss_type": "sapo"},
    "luspo": {"grpo.loss_type": "luspo", "grpo.importance_sampling_level": "sequence"},
    "vespo": {"grpo.loss_type": "vespo"},
    "reference": {"grpo.beta": 0.1, "grpo.sync_ref_model": True, "grpo.ref_model_sync_steps": 2},
    "reused": {"grpo.num_iterations": 2, "grpo.steps_per_generation": 2, "train.weight_decay": 0.1},
    "entropy": {"grpo.top_entropy_quantile": 0.5, "grpo.entropy_coef": 0.01},
    "batch": {"grpo.scale_rewards": "batch", "train.max_grad_norm": 0.01, "grpo.mask_truncated_completions": True},
    "padded": {"model.share_prefix": False},
    "large batches": {"train.micro_batch_tokens": 4096},
    # Each process scores its part of it.
    "one prompt": {
        "train.prompts_per_step": 1,
        "grpo.num_generations": 3,
        "rewards.reward_funcs": "[rewards.length.close_to_characters, rewards.diversity.unique_characters]",
    },
    "experts": {"grpo.router_aux_loss_coef": 0.1},
    "adapters": {"model.lora.r": 2, "grpo.beta": 0.1, "train.learning_rate": 0.01},
    "adapters and more": {
        "model.lora": "{r: 2, use_dora: true, dropout: 0.2, modules_to_save: [embed_tokens, model.norm]}",
        "grpo.beta": 0.1,
        "grpo.steps_per_generation": 2,
    },
    # Not every process has an image in each of its micro-batches.
    "images": {
        "dataset.name": "images.jsonl",
        "dataset.conversational": True,
        "rewards.reward_funcs": "[my_rewards.noisy, rewards.length.num_characters]",
        "grpo.beta": 0.1,
        "grpo.steps_per_generation": 2,
        "model.freeze": "[lm_head]",
        "train.learning_rates": "{vision_tower: 0.0001}",
        "train.micro_batch_tokens": 96,
    },
    "evaluated": {
        "eval.datasets": "{letters: {name: data.jsonl, reward_funcs: [my_rewards.early], success: {reward: early}}, "
        "all: {name: data.jsonl}}",
        "eval.num_generations": 2,
        "eval.temperature": 1,
        "eval.every": 2,
        "eval.best_metric": "eval/letters/maj@2",  # of answers that only the main process is told
    },
}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Experiment:
    return make_experiment(tmp_path_factory.mktemp("experiment"), tiny_model_folder, **SMALL)


SETTINGS_OF: dict[str, Iterable[str]] = {
    "ddp": SETTINGS,
    "deepspeed_zero1": ("dapo", "reference", "reused"),
    "deepspeed_zero2": ("dapo", "reference", "reused"),
    "deepspeed_zero3": SETTINGS,
    "fsdp2": SETTINGS,
}
"""What is trained with each strategy."""

COMPUTED_AGAIN = ("dapo", "reference", "reused", "experts", "adapters", "adapters and more", "images")
"""Where parts of the forward are computed again for the backward, which is a third of the time of runs as small as these."""


def changes(experiment: Experiment, name: str, where: str) -> dict[str, object]:
    found = {**SETTINGS[name], "train.output_dir": experiment.output(f"{where}-{name}")}
    if name not in COMPUTED_AGAIN:
        found["train.gradient_checkpointing"] = False
    if where.startswith("deepspeed"):
        # Otherwise parameters as small as these would stay whole.
        (experiment.folder / "zero.json").write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
        found |= {"distributed.deepspeed_config": "zero.json"}
    if where != "one":
        found |= {"distributed.strategy": where}
    if name == "experts":  # some of which no token of a process goes to
        found["model.name_or_path"] = experiment.folder / "experts"
    if name == "images":
        found["model.name_or_path"] = experiment.folder / "seeing"
    return found


@pytest.fixture(scope="module")
def in_two(experiment: Experiment, warm: WarmStart) -> Callable[[str], None]:
    """Does all settings with a strategy in two processes, once."""
    build_tiny_model(experiment.folder / "experts", "qwen3_moe")
    build_tiny_vision_model(experiment.folder / "seeing", "qwen2_5_vl")
    rows = [
        {"prompt": word, "images": [f"{place}.png" for place in range(number % 3)]} for number, word in enumerate(WORDS)
    ]
    (experiment.folder / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for place, content in enumerate(PICTURES):
        (experiment.folder / f"{place}.png").write_bytes(content)

    tried = set[str]()

    def train(strategy: str) -> None:
        if strategy in tried:  # a failure is told once
            return
        tried.add(strategy)
        jobs = [(experiment.recipe, changes(experiment, name, strategy), None) for name in SETTINGS_OF[strategy]]
        train_in_forked(warm, 2, jobs)

    return train


@pytest.mark.parametrize(
    ("strategy", "name"), [(strategy, name) for strategy, names in SETTINGS_OF.items() for name in names]
)
def test_two_processes_train_as_one(
    experiment: Experiment, in_two: Callable[[str], None], strategy: str, name: str
) -> None:
    in_two(strategy)
    alone = changes(experiment, name, "one")
    if not experiment.output(f"one-{name}").exists():
        run(load_recipe(experiment.recipe, overrides(alone)))
    assert_close(experiment.output(f"{strategy}-{name}"), experiment.output(f"one-{name}"))


def test_three_processes_with_less_work_than_processes_train_as_one(experiment: Experiment, warm: WarmStart) -> None:
    """Two completions a step: one process has nothing to do, and waits for nobody in vain."""
    few: dict[str, object] = {"train.prompts_per_step": 1, "grpo.num_generations": 2}
    run(load_recipe(experiment.recipe, overrides({**few, "train.output_dir": experiment.output("one-few")})))
    train_in_forked(warm, 3, [(experiment.recipe, {**few, "train.output_dir": experiment.output("three-few")}, None)])
    assert_close(experiment.output("three-few"), experiment.output("one-few"))


def test_a_resumed_run_is_the_same_also_with_another_number_of_processes(
    experiment: Experiment, warm: WarmStart
) -> None:
    shared: dict[str, object] = {"grpo.num_iterations": 2, "grpo.beta": 0.1}

    def job(output: str, resume: str | None, **more: object) -> tuple[Path, Mapping[str, object], str | None]:
        places = {"train.output_dir": experiment.output(output), "train.save_steps": 3}
        return experiment.recipe, {**shared, **places, **more}, resume

    begun = str(experiment.output("whole") / "checkpoints" / "step-000003")
    # With a reward that draws from the global generators, of each process.
    noisy = {"rewards.spread": True, "rewards.reward_funcs": "[my_rewards.noisy]"}
    begun_noisy = str(experiment.output("noisy") / "checkpoints" / "step-000003")
    noisy_jobs = [job("noisy", None, **noisy), job("noisy-again", begun_noisy, **noisy)]
    train_in_forked(warm, 2, [job("whole", None), job("again", begun), *noisy_jobs])
    recipe, changed, _ = job("alone", None)
    run(load_recipe(recipe, overrides(changed)), resume=begun)
    whole, again, alone = (experiment.output(name) for name in ("whole", "again", "alone"))
    for mine, theirs in ((again, whole), (experiment.output("noisy-again"), experiment.output("noisy"))):
        assert all(torch.equal(value, weights(mine)[name]) for name, value in weights(theirs).items())
    for name, value in weights(alone).items():
        torch.testing.assert_close(value, weights(whole)[name], rtol=1e-4, atol=2e-5)


def test_processes_with_different_weights_are_refused(experiment: Experiment, warm: WarmStart) -> None:
    for rank in range(2):
        build_tiny_model(experiment.folder / f"model-{rank}", seed=rank)
    different = overrides(
        {"model.name_or_path": experiment.folder / "model-{rank}", "train.output_dir": experiment.output("different")}
    )
    told = json.dumps([(str(experiment.recipe), different, None)])
    codes, _, errors = run_forked(warm, 2, told, program=PROGRAM)
    assert 0 not in codes
    assert "process 1 has loaded other weights than process 0" in errors
    assert not (experiment.output("different") / "metrics.jsonl").exists()


ENDLESS = ("train.max_steps=100000",)


def test_one_command_trains_in_two_processes_with_one_voice(experiment: Experiment) -> None:
    launched = Launched(experiment, "launched")
    code, output, errors = launched.end()
    assert (code, errors) == (0, "")
    run(load_recipe(experiment.recipe, [f"train.output_dir={experiment.output('not-launched')}"]))
    assert_close(launched.output, experiment.output("not-launched"))
    assert output.count(" on cpu in 2 processes") == 1
    assert output.count("; the first process scores everything") == 1
    assert len(re.findall(r"^step +1/5", output, re.MULTILINE)) == 1
    assert output.count(str(launched.output / "final")) == 1


LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--nproc-per-node=2"),
    # With `--cpu` it starts one process, whatever their number is said to be.
    "accelerate": (
        *("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"),
    ),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_command_joins_what_another_launcher_has_started(experiment: Experiment, launcher: str) -> None:
    """As a user starts it, from scratch."""
    module, *options = LAUNCHERS[launcher]
    port = "--main_process_port" if launcher == "accelerate" else "--master-port"
    output = experiment.output(launcher)
    train = ["-m", "grpo_cli", "train", experiment.recipe, "train.max_steps=1", f"train.output_dir={output}"]
    told = subprocess.run(
        [sys.executable, "-m", module, *options, f"{port}={free_port()}", *map(str, train)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.count(" on cpu in 2 processes") == 1
    assert len(records(output)) == 1


def test_tasks_of_a_slurm_step_train_together(experiment: Experiment) -> None:
    """With what srun tells its tasks; a job that lost its second task would wait for it, so both must have found each other."""
    output = experiment.output("slurm")
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "grpo_cli", "train", str(experiment.recipe), f"train.output_dir={output}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    told = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], told
    assert " on cpu in 2 processes" in told[0][0]
    assert told[1] == ("", "")
    assert len(records(output)) == 5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_all(
    experiment: Experiment, warm: WarmStart, number: signal.Signals, code: int
) -> None:
    name = f"stopped-{code}"
    launched = Launched(experiment, name, *ENDLESS, warm=warm)
    launched.wait_for_steps(2)
    workers = launched.workers()
    launched.process.send_signal(number)
    ended, output, errors = launched.end()
    assert ended == code, (output, errors)
    assert errors.count("stopped by") == 1
    assert "Traceback" not in errors
    assert not any(worker.is_running() for worker in workers.values())
    done = records(launched.output)[-1]["step"]
    assert (launched.output / "checkpoints" / f"step-{done:06d}").is_dir()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process learns of its parent's death")
def test_processes_of_a_killed_launcher_save_and_end(experiment: Experiment, warm: WarmStart) -> None:
    launched = Launched(experiment, "without-launcher", *ENDLESS, warm=warm)
    launched.wait_for_steps(2)
    workers = launched.workers()
    launched.process.kill()
    _, alive = psutil.wait_procs(workers.values(), timeout=60)
    assert not alive
    code, _, errors = launched.end()
    assert (code, errors.count("stopped by SIGTERM")) == (-signal.SIGKILL, 1)
    done = records(launched.output)[-1]["step"]
    assert (launched.output / "checkpoints" / f"step-{done:06d}").is_dir()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_others_and_says_so(experiment: Experiment, warm: WarmStart, rank: int) -> None:
    launched = Launched(experiment, f"killed-{rank}", *ENDLESS, "train.save_steps=1", warm=warm)
    launched.wait_for_steps(2)
    launched.end_by_killing(rank, seconds=30)
    if rank == 1:
        done = records(launched.output)[-1]["step"]
        assert (launched.output / "checkpoints" / f"step-{done:06d}").is_dir()


def test_an_error_is_told_once(experiment: Experiment, warm: WarmStart) -> None:
    launched = Launched(experiment, "wrong", "model.name_or_path=nowhere/to-be-found", warm=warm)
    code, _, errors = launched.end()
    assert code == 2
    assert errors.count("error:") == 1
    assert "Traceback" not in errors


def test_same_run_in_the_same_number_of_processes(experiment: Experiment, warm: WarmStart) -> None:
    """Bit for bit: the order of sums does not depend on which process is faster."""
    outputs = [experiment.output(name) for name in ("first", "second")]
    train_in_forked(warm, 2, [(experiment.recipe, {"train.output_dir": output}, None) for output in outputs])
    assert_same_run(*outputs)
