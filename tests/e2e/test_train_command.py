"""`grpo train` as a process: what it prints, where it leaves things, and its exit codes.

A whole run, a run that is interrupted, and a recipe with an error start from scratch; the others are forked (see `warm_start`).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e.experiment import Experiment, make_experiment, records
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_start import WarmCommand, WarmStart

from grpo_cli.cli.train import with_resume_value

GRPO = [sys.executable, "-m", "grpo_cli"]


def grpo(*arguments: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command from scratch to its end."""
    return subprocess.run(
        [*GRPO, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def finished(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, str]:
    """A run that is complete, and its output."""
    experiment = make_experiment(
        tmp_path_factory.mktemp("finished"),
        tiny_model_folder,
        eval={"dataset": {"name": "data.jsonl", "max_rows": 2}, "every": 3},
        logging={"print_completions_steps": 5, "num_completions_to_print": 1, "report_to": ["tensorboard"]},
    )
    outcome = grpo("train", experiment.recipe)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    return experiment, outcome.stdout


def test_a_run_tells_its_plan_its_steps_and_where_everything_is(finished: tuple[Experiment, str]) -> None:
    experiment, output = finished
    for expected in (
        "prompts: 12 from 12 rows",
        "  step      2 prompts x 2 completions = 4 completions, loss dapo",
        "  run       6 steps (1 epochs), each on new completions",
        "finished 6 of 6 steps in ",
        f"  model             {experiment.output()}/final",
        f"  metrics           {experiment.output()}/metrics.jsonl",
        f"  completions       {experiment.output()}/completions",
    ):
        assert expected in output
    assert re.findall(r"^step (\d)/6  ", output, re.MULTILINE) == ["1", "2", "3", "4", "5", "6"]
    assert "\x1b" not in output


def test_the_run_directory_is_complete(finished: tuple[Experiment, str]) -> None:
    experiment, _ = finished
    names = {path.name for path in experiment.output().iterdir()}
    assert names == {
        "recipe.yaml",
        "metrics.jsonl",
        "completions",
        "eval",
        "checkpoints",
        "final",
        "tensorboard",
        ".lock",
    }
    steps = [(record["step"], "eval/reward" in record) for record in records(experiment.output())]
    assert steps == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
        (3, True),
        (4, False),
        (5, False),
        (6, False),
        (6, True),
    ]
    train_files = sorted(path.name for path in (experiment.output() / "completions").iterdir())
    assert train_files == [f"train-{step:06d}.parquet" for step in range(1, 7)]


def test_the_saved_recipe_repeats_the_run(finished: tuple[Experiment, str], tmp_path: Path, warm: WarmStart) -> None:
    experiment, _ = finished
    saved = experiment.folder / "again.yaml"
    saved.write_text((experiment.output() / "recipe.yaml").read_text())
    outcome = warm.run("train", saved, f"train.output_dir={tmp_path / 'again'}")
    assert outcome.returncode == 0, outcome.stderr
    rewards = [record.get("reward") for record in records(experiment.output())]
    assert [record.get("reward") for record in records(tmp_path / "again")] == rewards


def test_the_final_model_is_a_plain_folder(finished: tuple[Experiment, str]) -> None:
    experiment, _ = finished
    mask = os.umask(0o022)
    os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (experiment.output() / "final").iterdir()}
    assert set(modes.values()) == {0o666 & ~mask}, modes
    model = AutoModelForCausalLM.from_pretrained(experiment.output() / "final")
    tokenizer = AutoTokenizer.from_pretrained(experiment.output() / "final")
    ids = tokenizer("red ", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=2).shape[1] > ids.shape[1]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_exit_with_their_code(
    number: signal.Signals, exit_code: int, tiny_model_folder: Path, tmp_path: Path, warm: WarmStart
) -> None:
    """Ctrl-C, whose handling a process inherits, comes to one that was started from scratch."""
    experiment = make_experiment(
        tmp_path,
        tiny_model_folder,
        train={"prompts_per_step": 2, "max_steps": 100_000, "output_dir": str(tmp_path / "run")},
    )
    process: subprocess.Popen[str] | WarmCommand
    if number == signal.SIGINT:
        process = subprocess.Popen(
            [*GRPO, "train", str(experiment.recipe)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    else:
        process = warm.start("train", experiment.recipe)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == exit_code
    assert errors == f"stopped by {number.name}\n"
    done = records(experiment.output())[-1]["step"]
    assert f"stopped at step {done} of 100000 after" in output
    state = json.loads((experiment.output() / f"checkpoints/step-{done:06d}/state.json").read_text())
    assert state["step"] == done


@pytest.mark.parametrize(
    ("overrides", "message", "exit_code"),
    [
        (["grpo.num_generation=4"], "command line: grpo.num_generation: ", 2),
        (["dataset.name=nowhere.jsonl"], "nowhere.jsonl", 2),
        (["model.name_or_path=./nowhere"], "./nowhere", 2),
        (["train.prompts_per_step=13"], "12", 2),
        (["rewards.reward_funcs=[my_rewards.few_leters]"], "few_letters", 2),
        (["dataset.columns={question: prompt}"], "no column `prompt`", 2),
        (["--resume", "nowhere"], "--resume nowhere: there is no such folder", 5),
    ],
)
def test_errors_are_for_people(
    overrides: list[str], message: str, exit_code: int, tiny_model_folder: Path, tmp_path: Path, warm: WarmStart
) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder)
    outcome = warm.run("train", experiment.recipe, *overrides)
    assert outcome.returncode == exit_code, outcome.stderr
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not experiment.output().exists()


def test_a_recipe_with_an_error_is_refused_from_scratch(tiny_model_folder: Path, tmp_path: Path) -> None:
    outcome = grpo("train", make_experiment(tmp_path, tiny_model_folder).recipe, "grpo.num_generation=4")
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("command line: grpo.num_generation: ")
    assert outcome.stdout == ""


def test_a_reward_that_raises_names_itself_and_loses_nothing(
    tiny_model_folder: Path, tmp_path: Path, warm: WarmStart
) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder)
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text(
        rewards.read_text() + "\n\ndef fragile(completions, trainer_state, **_):\n"
        "    return [1 / (3 - trainer_state.global_step) for _ in completions]\n"
    )
    broken = warm.run("train", experiment.recipe, "rewards.reward_funcs=[my_rewards.fragile]")
    assert broken.returncode == 3
    assert "reward function 'fragile' raised ZeroDivisionError" in broken.stderr
    assert "Traceback" not in broken.stderr
    assert "stopped at step 3 of 6" in broken.stdout
    assert (experiment.output() / "checkpoints" / "step-000003").is_dir()
    debug = warm.run("train", "--debug", experiment.recipe, "rewards.reward_funcs=[my_rewards.fragile]", "--resume")
    assert "Traceback" in debug.stderr
    assert "ZeroDivisionError" in debug.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "a.yaml", "--resume"], ["train", "a.yaml", "--resume=newest"]),
        (["train", "--resume", "a=1"], ["train", "--resume=newest", "a=1"]),
        (["train", "a.yaml", "--resume", "--debug"], ["train", "a.yaml", "--resume=newest", "--debug"]),
        (["train", "a.yaml", "--resume", "runs/x"], ["train", "a.yaml", "--resume", "runs/x"]),
        (["train", "a.yaml", "--resume=runs/x"], ["train", "a.yaml", "--resume=runs/x"]),
    ],
)
def test_resume_may_leave_its_path_out(arguments: list[str], expected: list[str]) -> None:
    assert with_resume_value(arguments) == expected
