"""`grpo eval` as a process: its numbers, that they depend on nothing but seed, model and recipe, and that nothing is lost to a kill."""

import json
import time
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.experiment import WORDS, Experiment, make_experiment, records
from tiny_models import build_tiny_model
from warm_start import WarmStart

from grpo_cli.recipe.eval_tasks import possible_metrics
from grpo_cli.recipe.load import load_recipe

pytestmark = pytest.mark.e2e

LETTERS = {"name": "held_out.jsonl", "reward_funcs": ["my_rewards.early"], "subset_column": "level"}
BRIEF = {"name": "held_out.jsonl", "max_rows": 5, "temperature": 0.0, "num_generations": 1}


@pytest.fixture
def experiment(tiny_model_folder: Path, tmp_path: Path) -> Experiment:
    """A run with two datasets to evaluate on: sampled with rewards of its own, and greedy with those of the run."""
    evaluated = {"temperature": 1.0, "num_generations": 4, "datasets": {"letters": LETTERS, "brief": BRIEF}}
    made = make_experiment(tmp_path, tiny_model_folder, eval=evaluated)
    rows = [{"prompt": f"{word}: ", "level": ("easy", "hard")[index % 2]} for index, word in enumerate(WORDS)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def evaluated(warm: WarmStart, experiment: Experiment, output: str, *arguments: object) -> Path:
    """Run the command to its end, and give the folder of its only or first model."""
    outcome = warm.run("eval", experiment.recipe, "--output", experiment.output(output), *arguments)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    return next(path.parent for path in sorted(experiment.output(output).glob("*/eval.json")))


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "eval.json").read_text())
    return found


def groups_of(folder: Path, dataset: str) -> list[list[dict[str, Any]]]:
    """Read the completions of a dataset, prompt by prompt."""
    rows = pq.read_table(folder / dataset / "completions.parquet").to_pylist()
    uids = list(dict.fromkeys(row["prompt_uid"] for row in rows))
    return [[row for row in rows if row["prompt_uid"] == uid] for uid in uids]


def test_the_numbers_are_those_of_the_completions(experiment: Experiment, warm: WarmStart) -> None:
    """Recomputed here from the parquet file, with sets of completions and votes written out."""
    folder = evaluated(warm, experiment, "out")
    told = document(folder)["datasets"]["letters"]
    groups = groups_of(folder, "letters")
    assert (told["prompts"], told["completions"], len(groups)) == (12, 48, 12)
    values = {name: estimate["value"] for name, estimate in told["metrics"].items()}
    correct = [[row["reward/early"] for row in group] for group in groups]
    assert 0 < mean(map(mean, correct)) < 1, "otherwise there is nothing to see"
    for name in ("reward", "reward/early/mean", "avg@4", "pass@1"):
        assert values[name] == pytest.approx(mean(map(mean, correct)))
    for size in (2, 4):
        choices = [[max(choice) for choice in combinations(group, size)] for group in correct]
        assert values[f"pass@{size}"] == pytest.approx(mean(map(mean, choices)))
    assert values["maj@4"] == pytest.approx(mean(map(vote, groups)))
    assert values["completions/mean_length"] == pytest.approx(
        mean(row["num_tokens"] for group in groups for row in group)
    )
    cut = [row["finish_reason"] == "length" for group in groups for row in group]
    assert values["completions/clipped_ratio"] == pytest.approx(mean(cut))
    assert told["others"]["answered"] == mean(row["answer"] is not None for group in groups for row in group)
    assert not any(name.startswith("time/") for name in told["others"])
    low, high = told["metrics"]["avg@4"]["low"], told["metrics"]["avg@4"]["high"]
    assert 0 <= low < values["avg@4"] < high <= 1

    easy = told["subsets"]["easy"]["avg@4"]
    assert easy["value"] == pytest.approx(mean(map(mean, correct[::2])))
    assert (easy["prompts"], easy["count"]) == (6, 24)


def vote(group: list[dict[str, Any]]) -> float:
    answers = Counter(row["answer"] for row in group if row["answer"] is not None)
    if not answers:
        return 0.0
    most = max(answers.values())
    return mean(float(answer < "m") for answer, count in answers.items() if count == most)


def test_a_table_says_it_and_why_something_is_missing(experiment: Experiment, warm: WarmStart) -> None:
    outcome = warm.run("eval", experiment.recipe, "--output", experiment.output("out"))
    assert outcome.returncode == 0, outcome.stderr
    for expected in (
        "letters: 12 prompts x 4 completions, 95 % intervals",
        "letters by subset",
        "brief: 5 prompts x 1 completions, 95 % intervals",
        "pass@4",
        "the reward few_letters gives other values than 0 and 1; eval.success can say which completions are correct",
    ):
        assert expected in outcome.stdout
    assert "\x1b" not in outcome.stdout


@pytest.mark.slow
def test_any_batch_size_gives_the_same_bytes(experiment: Experiment, warm: WarmStart) -> None:
    found = [
        (evaluated(warm, experiment, f"out{size}", f"generation.max_num_seqs={size}") / "eval.json").read_bytes()
        for size in (1, 4, 64)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0] != (evaluated(warm, experiment, "seed", "train.seed=1") / "eval.json").read_bytes()


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_where_it_was(experiment: Experiment, warm: WarmStart) -> None:
    """256 completions a prompt make six parts. That those are taken which the killed one wrote shows when one is changed meanwhile."""
    many = ("eval.datasets.letters.num_generations=256", "eval.datasets.brief=null")
    whole = evaluated(warm, experiment, "whole", *many)
    process = warm.start("eval", experiment.recipe, "--output", experiment.output("killed"), *many)
    folder = experiment.output("killed") / whole.name
    deadline = time.monotonic() + 60
    while not (folder / "letters" / "part-00001.parquet").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait(60)
    assert not (folder / "eval.json").exists(), "it was faster than the kill"
    first = folder / "letters" / "part-00000.parquet"
    before = first.read_bytes()
    evaluated(warm, experiment, "killed", *many)
    assert (folder / "eval.json").read_bytes() == (whole / "eval.json").read_bytes()
    assert first.read_bytes() == before, "parts stay, to be scored again"

    for name in ("eval.json", "letters/completions.parquet"):
        (folder / name).unlink()
    table = pq.read_table(first)
    reasons = pa.array(["stop"] * len(table), pa.string())
    pq.write_table(table.set_column(table.column_names.index("finish_reason"), "finish_reason", reasons), first)
    evaluated(warm, experiment, "killed", *many)
    clipped = [document(one)["datasets"]["letters"]["metrics"]["completions/clipped_ratio"] for one in (folder, whole)]
    assert clipped[0]["value"] < clipped[1]["value"]


@pytest.mark.slow
def test_what_was_evaluated_is_not_done_again_and_not_mixed_up(experiment: Experiment, warm: WarmStart) -> None:
    folder = evaluated(warm, experiment, "out")
    before = (folder / "eval.json").read_bytes()
    again = warm.run("eval", experiment.recipe, "--output", experiment.output("out"))
    assert "letters: evaluated before" in again.stdout
    assert (folder / "eval.json").read_bytes() == before

    other = ("eval", experiment.recipe, "--output", experiment.output("out"), "eval.temperature=0.5")
    refused = warm.run(*other)
    assert refused.returncode == 5
    assert "holds an evaluation with another sampling.temperature: 1.0, and now 0.5" in refused.stderr
    assert "--overwrite" in refused.stderr
    assert (folder / "eval.json").read_bytes() == before
    assert warm.run(*other, "--overwrite").returncode == 0
    assert document(folder)["datasets"]["letters"]["sampling"]["temperature"] == 0.5


def test_models_are_compared_prompt_by_prompt(experiment: Experiment, warm: WarmStart, tiny_model_folder: Path) -> None:
    other = build_tiny_model(experiment.folder / "other", seed=1)
    outcome = warm.run(
        "eval", experiment.recipe, "--output", experiment.output("out"), "--model", tiny_model_folder, "--model", other
    )
    assert outcome.returncode == 0, outcome.stderr
    label = tiny_model_folder.name
    assert f"other - {label}" in outcome.stdout
    comparison = json.loads((experiment.output("out") / "comparison.json").read_text())
    assert comparison["baseline"] == label
    told = comparison["differences"]["other"]["letters"]["metrics"]["avg@4"]
    rewards = [
        [[row["reward/early"] for row in group] for group in groups_of(experiment.output("out") / name, "letters")]
        for name in ("other", label)
    ]
    ours, theirs = ([mean(group) for group in model] for model in rewards)
    assert told["value"] == pytest.approx(mean(ours) - mean(theirs))
    assert told["low"] < told["value"] < told["high"]
    assert told["prompts"] == 12
    hard = comparison["differences"]["other"]["letters"]["subsets"]["hard"]["avg@4"]
    assert hard["value"] == pytest.approx(mean(ours[1::2]) - mean(theirs[1::2]))
    assert hard["prompts"] == 6


@pytest.mark.slow
def test_training_evaluates_the_same_and_picks_the_best(experiment: Experiment, warm: WarmStart) -> None:
    """The last evaluation of the run and `grpo eval` of its final model have the same numbers."""
    outcome = warm.run(
        "train", experiment.recipe, "eval.every=2", "eval.best_metric=eval/letters/pass@2", "train.learning_rate=0.02",
        "rewards.reward_funcs=[my_rewards.few_letters, my_rewards.noisy]", "eval.datasets.letters.success={reward: early}",
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr
    evaluations = [record for record in records(experiment.output()) if "eval/reward" in record]
    assert [record["step"] for record in evaluations] == [0, 2, 4, 6]
    known = {*possible_metrics(load_recipe(experiment.recipe).recipe), "step", "eval/letters/answered"}
    assert set(evaluations[0]) <= known
    for record in evaluations:
        assert record["eval/reward"] == pytest.approx((record["eval/letters/reward"] + record["eval/brief/reward"]) / 2)
        assert {"eval/letters/maj@4", "eval/letters/avg@4", "eval/brief/reward/noisy/mean"} <= set(record)
    names = sorted(path.name for path in (experiment.output() / "eval").iterdir())
    assert names == [f"{name}-{step:06d}.parquet" for name in ("brief", "letters") for step in (0, 2, 4, 6)]

    best = max(evaluations, key=lambda record: (record["eval/letters/pass@2"], -record["step"]))
    marked = experiment.output() / "checkpoints" / "best.json"
    assert marked.exists() == (best["step"] > 0)
    if marked.exists():
        assert json.loads(marked.read_text())["step"] == best["step"]

    found = document(evaluated(warm, experiment, "out", "--model", experiment.output()))["datasets"]["letters"]
    for name in ("avg@4", "pass@2", "maj@4", "reward", "completions/mean_length"):
        assert found["metrics"][name]["value"] == evaluations[-1][f"eval/letters/{name}"]


@pytest.mark.slow
def test_adapters_are_evaluated_on_their_model(experiment: Experiment, warm: WarmStart) -> None:
    outcome = warm.run(
        "train", experiment.recipe, "model.lora={r: 2}", "train.max_steps=2", "train.learning_rate=0.1",
        "rewards.reward_funcs=[my_rewards.few_letters]",
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr
    last = [record for record in records(experiment.output()) if "eval/reward" in record][-1]
    found = document(evaluated(warm, experiment, "out", "--model", "final"))
    assert found["label"] == "run-final"
    assert found["datasets"]["letters"]["metrics"]["avg@4"]["value"] == last["eval/letters/avg@4"]
    begun = f"model.lora.adapter_name_or_path={experiment.output() / 'final'}"
    assert document(evaluated(warm, experiment, "begun", begun))["datasets"] == found["datasets"], (
        "without --model, too"
    )


@pytest.mark.slow
def test_a_function_finds_answers_where_no_reward_logs_them(experiment: Experiment, warm: WarmStart) -> None:
    logged = evaluated(warm, experiment, "logged")
    overrides = ("eval.datasets.letters.answer_function=my_rewards.first_letter", "eval.answer_column=nothing")
    found = evaluated(warm, experiment, "found", *overrides)
    votes = [document(folder)["datasets"]["letters"]["metrics"]["maj@4"] for folder in (logged, found)]
    assert votes[0] == votes[1]
    without = evaluated(warm, experiment, "without", "eval.answer_column=nothing")
    told = document(without)["datasets"]["letters"]
    assert "maj@4" not in told["metrics"]
    assert any("no majority vote" in note for note in told["notes"])


@pytest.mark.parametrize(
    ("arguments", "message", "exit_code"),
    [
        (["--model", "./nowhere"], "--model: ./nowhere does not exist", 2),
        (["eval.best_metric=eval/letters/pas@4"], "did you mean `eval/letters/pass@4`?", 2),
        (
            ["eval.datasets=null", "eval.temperature=0", "eval.num_generations=1"],
            "eval.dataset: not set; required by `grpo eval`",
            2,
        ),
        (["eval.datasets.letters.subset_column=levle"], 'found "levle"; eval.datasets.letters has the columns', 2),
        (["eval.datasets.letters.answer_function=my_rewards.noisy"], "raised TypeError", 3),
        (["vllm.mode=colocate", "vllm.tensor_parallel_size=2"], "but `grpo eval` is one process; allowed: 1", 4),
    ],
)
def test_errors_are_for_people(
    arguments: list[str], message: str, exit_code: int, experiment: Experiment, warm: WarmStart
) -> None:
    outcome = warm.run("eval", experiment.recipe, *arguments)
    assert outcome.returncode == exit_code, outcome.stderr
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_rewards_that_fail_too_often_end_it_and_leave_the_completions(experiment: Experiment, warm: WarmStart) -> None:
    rewards = experiment.folder / "my_rewards.py"
    sound = rewards.read_text()
    rewards.write_text(sound.replace("    answers = ", "    broken\n    answers = "))
    arguments = ("eval", experiment.recipe, "rewards.on_error=drop", "--output", experiment.output("out"))
    broken = warm.run(*arguments)
    assert broken.returncode == 4
    assert "letters: a reward function failed on 12 of 12 prompts" in broken.stderr
    assert len(list(experiment.output("out").glob("*/letters/part-*"))) == 1
    rewards.write_text(sound)
    mended = warm.run(*arguments)
    assert mended.returncode == 0, mended.stderr
    assert "letters: 12 of 12 prompts\n" in mended.stdout, "no token was sampled again"


def test_one_process_is_enough(experiment: Experiment, warm: WarmStart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = warm.run("eval", experiment.recipe)
    assert outcome.returncode == 4
    assert "runs in one process; 2 were launched" in outcome.stderr
