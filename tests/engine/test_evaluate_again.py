"""`grpo eval` on what is there: nothing is sampled again that need not be, nothing of anybody else's is removed, and it says so."""

import json
from pathlib import Path

import pytest
from e2e.experiment import Experiment, make_experiment
from engine.copying_engine import CopyingEngine, truth

from grpo_cli.engine.evaluate import evaluate
from grpo_cli.engine.evaluated_model import evaluated_models
from grpo_cli.engine.inputs import SamplingInputs
from grpo_cli.engine.rollouts import Told
from grpo_cli.errors import CheckpointError, DiskError, Interrupted
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.recipe.load import load_recipe

REWARDS = """

def long(completions, least=3, **_):
    return [float(len(text) >= least) for text in completions]


def picky(prompts, completions, **_):
    if prompts[0] != "red ":
        raise ValueError("no such colour")
    return [1.0] * len(completions)
"""


@pytest.fixture
def experiment(tiny_model_folder: Path, tmp_path: Path) -> Experiment:
    made = make_experiment(
        tmp_path,
        tiny_model_folder,
        rewards={"reward_funcs": [{"path": "my_rewards.long"}, "my_rewards.few_letters"]},
        eval={"dataset": {"name": "data.jsonl"}, "temperature": 0.8, "num_generations": 3},
    )
    with (tmp_path / "my_rewards.py").open("a") as file:
        file.write(REWARDS)
    return made


def evaluated(experiment: Experiment, output: str, *overrides: str, overwrite: bool = False) -> Path:
    """Evaluate, and give the folder of the recipe's model."""
    loaded = load_recipe(experiment.recipe, list(overrides))
    folder = experiment.output(output)
    evaluate(loaded, evaluated_models([], loaded), output=folder, overwrite=overwrite)
    return next(path.parent for path in folder.glob("*/eval.json"))


def sampling_fails(*_: object) -> None:
    raise AssertionError("something is sampled")


SAME_REWARDS = "rewards.reward_funcs=[{path: my_rewards.long, isolated: false}, my_rewards.few_letters]"
OTHER_REWARDS = "rewards.reward_funcs=[{path: my_rewards.long, parameters: {least: 6}}, my_rewards.few_letters]"


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        (OTHER_REWARDS, "reward_funcs"),
        ("rewards.reward_weights=[1, 2]", "reward_weights"),
        ("eval.answer_function=my_rewards.first_letter", "answer_function"),
    ],
)
def test_other_rewards_score_the_kept_completions_again(
    experiment: Experiment,
    override: str,
    changed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fresh = evaluated(experiment, "fresh", override)
    evaluated(experiment, "again")
    monkeypatch.setattr("grpo_cli.engine.evaluate.open_sampler", sampling_fails)
    again = evaluated(experiment, "again", override)
    assert (again / "eval.json").read_bytes() == (fresh / "eval.json").read_bytes()
    assert f"dataset: the kept completions are scored again, with another {changed}\n" in capsys.readouterr().out


@pytest.mark.parametrize("override", [SAME_REWARDS, "eval.success={reward: long, threshold: 1}"])
def test_what_rewards_do_not_depend_on_scores_nothing_again(
    experiment: Experiment, override: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated(experiment, "out")
    monkeypatch.setattr("grpo_cli.engine.evaluate.scored", sampling_fails)
    evaluated(experiment, "out", override)
    assert "dataset: evaluated before" in capsys.readouterr().out


@pytest.mark.parametrize("override", ["vllm.engine={max_num_batched_tokens: 64}", "vllm.max_model_length=64"])
def test_settings_of_vllm_that_change_samples_are_not_mixed_up(
    experiment: Experiment, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copying(inputs: SamplingInputs, policy: PolicyModel, _: Told) -> CopyingEngine:
        return CopyingEngine(policy.model, inputs.tokenizer, lie=truth, max_num_seqs=64)

    monkeypatch.setattr("grpo_cli.engine.vllm_rollouts.open_colocated", copying)
    evaluated(experiment, "out", "vllm.mode=colocate")
    with pytest.raises(CheckpointError, match=rf"another {override.partition('=')[0]}"):
        evaluated(experiment, "out", "vllm.mode=colocate", override)


def test_starting_over_removes_nothing_of_a_users(experiment: Experiment) -> None:
    folder = evaluated(experiment, "out")
    notes = folder / "dataset" / "notes.txt"
    notes.write_text("mine")
    evaluated(experiment, "out", "eval.temperature=0.5", overwrite=True)
    assert notes.read_text() == "mine"
    assert json.loads((folder / "eval.json").read_text())["datasets"]["dataset"]["sampling"]["temperature"] == 0.5


@pytest.mark.parametrize(
    ("overwrite", "command"), [(False, "the same command goes"), (True, "the same command without --overwrite goes")]
)
def test_a_signal_tells_which_command_goes_on(
    experiment: Experiment,
    overwrite: bool,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STOP_WHILE_SCORING", "1")
    with pytest.raises(Interrupted):
        evaluated(experiment, "out", "rewards.reward_funcs=[my_rewards.noisy]", overwrite=overwrite)
    assert f"what was sampled is kept: {command} on with it\n" in capsys.readouterr().out
    monkeypatch.setattr("grpo_cli.engine.evaluate.open_sampler", sampling_fails)
    evaluated(experiment, "out", "rewards.reward_funcs=[my_rewards.noisy]")


def test_problems_of_many_prompts_are_counted(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = "rewards.reward_funcs=[{path: my_rewards.picky, per_prompt: true}]"
    evaluated(experiment, "out", rewards, "rewards.on_error=drop")
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 6
    assert warnings[-1] == "warning: dataset: 6 more problems with reward functions"


def test_a_folder_that_cannot_be_written_is_an_outputs_and_no_runs(
    experiment: Experiment, tiny_model_folder: Path
) -> None:
    experiment.output("out").mkdir()
    (experiment.output("out") / tiny_model_folder.name).write_text("a file where a folder should be")
    with pytest.raises(DiskError, match=r"cannot (read|write)") as caught:
        evaluated(experiment, "out")
    assert caught.value.hint is not None
    assert "--output" in caught.value.hint
    assert "--resume" not in caught.value.hint


def test_an_old_comparison_does_not_stand_beside_newer_results(experiment: Experiment) -> None:
    evaluated(experiment, "out")
    (experiment.output("out") / "comparison.json").write_text("{}")
    evaluated(experiment, "out")
    assert not (experiment.output("out") / "comparison.json").exists()
