"""`grpo reward test` as a user runs it."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from e2e.experiment import Experiment, make_experiment
from warm_start import WarmStart

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture
def experiment(tiny_model_folder: Path, tmp_path: Path) -> Experiment:
    made = make_experiment(
        tmp_path, tiny_model_folder, rewards={"reward_funcs": ["my_rewards.few_letters", "my_rewards.right"]}
    )
    with (tmp_path / "my_rewards.py").open("a") as file:
        file.write(
            "\n\ndef right(completions, number, trainer_state, log_extra, log_metric, **_):\n"
            "    log_extra('letters', [len(text) for text in completions])\n"
            "    log_metric('share', 0.25)\n"
            "    if 'fail' in completions:\n        raise LookupError('no such word')\n"
            "    return [trainer_state.progress + each if text == str(each) else None for text, each in zip(completions, number)]\n"
        )
    return made


def test_completions_given_by_hand_are_scored_with_the_columns_of_their_row(
    experiment: Experiment, warm: WarmStart
) -> None:
    outcome = warm.run("reward", "test", experiment.recipe, "--row", "3", "--text", "3", "--text", "abc", "--step", "3")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    lines = [line.split() for line in outcome.stdout.splitlines()]
    assert ["row", "3", "3", "0", "3.5", "3.5"] in lines  # half of the run, and the number of the row
    assert ["abc", "-3", "-", "-3"] in lines
    few, right = (
        next(line for line in lines if line[:1] == [name] and len(line) > 5) for name in ("few_letters", "right")
    )
    assert few[1:7] == ["1", "-1.5", "2.121", "-3", "0", "0"]
    assert right[1:7] == ["1", "3.5", "-", "3.5", "3.5", "1"]
    assert outcome.stdout.splitlines()[-3:] == [
        "row 3, completion 0: letters: 1",
        "row 3, completion 1: letters: 3",
        "share 0.25",
    ]


def test_a_runs_completions_get_the_rewards_that_the_run_gave(experiment: Experiment, warm: WarmStart) -> None:
    assert warm.run("train", experiment.recipe, "train.max_steps=1").returncode == 0
    file = experiment.output() / "completions/train-000001.parquet"
    outcome = warm.run("reward", "test", experiment.recipe, "--from", file)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    rewards = pq.read_table(file)["reward/few_letters"].to_pylist()
    line = next(
        line.split() for line in outcome.stdout.splitlines() if line.split()[:1] == ["few_letters"] and "s" in line
    )
    assert float(line[2]) == pytest.approx(sum(rewards) / len(rewards), rel=1e-3, abs=1e-3)


def test_a_function_that_fails_is_told_and_the_others_are_scored(experiment: Experiment, warm: WarmStart) -> None:
    outcome = warm.run("reward", "test", experiment.recipe, "--text", "fail", "--text", "abc")
    assert outcome.returncode == 3
    assert "reward function 'right' raised LookupError: no such word" in outcome.stdout.replace("\n", " ")
    assert outcome.stderr == "error: reward functions failed: 1 problem\n"
    lines = [line.split() for line in outcome.stdout.splitlines()]
    assert ["row", "0", "fail", "-4", "failed", "-4"] in lines
    assert next(line for line in lines if line[:1] == ["right"] and len(line) > 5)[-1] == "1"
    assert next(line for line in lines if line[:1] == ["few_letters"] and len(line) > 5)[-1] == "0"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "one of --from and --text says which completions to score"),
        (("--text", "a", "--row", "99"), 2, "dataset: there is no row 99; it has 12"),
        (("--from", "nowhere.parquet"), 2, "nowhere.parquet: there is no such file"),
        (("--from", "{recipe}"), 2, "recipe.yaml: "),
    ],
)
def test_what_cannot_be_scored_is_told(
    experiment: Experiment, warm: WarmStart, arguments: tuple[str, ...], code: int, message: str
) -> None:
    outcome = warm.run(
        "reward", "test", experiment.recipe, *(each.format(recipe=experiment.recipe) for each in arguments)
    )
    assert outcome.returncode == code
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr
