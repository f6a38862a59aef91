"""The metrics of an evaluation, against their definitions and against what training computes of the same rewards."""

import math

import numpy as np
import pytest
import torch
from evaluation.evaluation_sheets import NOT_APPLIED, make_sheet

from grpo_cli.evaluation.measures import measures, successes
from grpo_cli.evaluation.question import Question, answered
from grpo_cli.evaluation.report import dataset_report
from grpo_cli.evaluation.sheet import Sheet
from grpo_cli.metrics import results
from grpo_cli.objective.advantages import AdvantageSettings, reward_metrics


def values_of(
    sheet: Sheet, *, reward: str | None = None, threshold: float = 1.0, sizes: tuple[int, ...] = (1, 2)
) -> dict[str, float]:
    found = measures(sheet, successes(sheet, reward, threshold), sizes)
    return {name: measure.value for name, measure in found.items()}


def test_rewards_are_those_that_training_tells() -> None:
    generator = np.random.default_rng(0)
    rewards = generator.normal(size=(7, 3, 2)).astype(np.float32)
    rewards[generator.random(rewards.shape) < 0.3] = NOT_APPLIED
    found = values_of(make_sheet(rewards.astype(np.float64), weights=[0.5, 2.0]))
    groups = list(torch.from_numpy(rewards))
    theirs = results(reward_metrics(groups, ["a", "b"], AdvantageSettings(weights=(0.5, 2.0))))
    for name in ("reward", "reward/a/mean", "reward/b/mean"):
        assert found[name] == pytest.approx(theirs[name], rel=1e-12)


def test_what_did_not_apply_is_left_out_and_never_zero() -> None:
    sheet = make_sheet([[[1.0], [NOT_APPLIED]], [[NOT_APPLIED], [NOT_APPLIED]], [[0.0], [1.0]]])
    found = measures(sheet, successes(sheet, None, 1.0), (1, 2))
    assert found["reward"].value == 2 / 3
    assert found["reward"].counts.tolist() == [1, 0, 2]
    assert found["avg@2"].value == 2 / 3
    assert found["pass@1"].value == (1 + 0.5) / 2, "a prompt without scores has no say"
    assert found["pass@2"].value == 1.0, "nor has one with a single score, where two are asked for"
    assert found["pass@2"].counts.tolist() == [0, 0, 1]


def test_a_metric_of_nothing_is_not_a_number() -> None:
    found = values_of(make_sheet([[[NOT_APPLIED]], [[NOT_APPLIED]]]), sizes=(1,))
    assert math.isnan(found["reward"])
    assert "avg@1" not in found


def test_lengths_and_truncation_are_means_over_completions() -> None:
    found = values_of(make_sheet(np.zeros((2, 2, 1)), lengths=np.array([[1.0, 2.0], [3.0, 6.0]])))
    assert found["completions/mean_length"] == 3.0
    assert found["completions/clipped_ratio"] == 0.5


def test_a_first_reward_of_zeros_and_ones_says_what_is_correct() -> None:
    rewards = [[[1.0, 0.3], [0.0, 0.1]], [[0.0, 0.2], [0.0, 0.9]]]
    found = values_of(make_sheet(rewards))
    assert (found["avg@2"], found["pass@1"], found["pass@2"]) == (0.25, 0.25, 0.5)


@pytest.mark.parametrize(("value", "reason"), [(0.5, "gives other values than 0 and 1"), (math.nan, "applied to no")])
def test_without_a_clear_success_there_is_none_and_a_reason(value: float, reason: str) -> None:
    sheet = make_sheet([[[value]], [[value]]])
    success = successes(sheet, None, 1.0)
    assert success.values is None
    assert success.note is not None
    assert reason in success.note
    assert not any("@" in name for name in measures(sheet, success, (1,)))


def test_a_threshold_on_a_named_reward_says_what_is_correct() -> None:
    sheet = make_sheet([[[0.0, 0.6], [1.0, 0.5]], [[1.0, 0.4], [1.0, NOT_APPLIED]]])
    assert values_of(sheet, reward="b", threshold=0.5)["avg@2"] == 2 / 3
    assert values_of(sheet, reward="b", threshold=0.6)["avg@2"] == 1 / 3


@pytest.mark.parametrize("threshold", [0.9, 0.7])
def test_a_reward_of_exactly_the_threshold_reaches_it_after_it_was_kept(threshold: float) -> None:
    """Rewards are kept in float32, which has neither number, and the one for 0.9 is below it."""
    kept = float(np.float32(threshold))
    below = float(np.nextafter(np.float32(threshold), np.float32(0)))
    assert values_of(make_sheet([[[kept], [below]]]), reward="a", threshold=threshold)["avg@2"] == 0.5


def test_what_is_correct_is_told_with_the_numbers() -> None:
    question = Question(success_reward="b", threshold=0.5, sizes=(1,))
    told = dataset_report(answered(make_sheet([[[0.0, 0.6]], [[1.0, 0.5]]]), question), seed=0)
    assert told["success"] == {"reward": "b", "threshold": 0.5}
    graded = dataset_report(
        answered(make_sheet([[[0.5]]]), Question(success_reward=None, threshold=1.0, sizes=(1,))), seed=0
    )
    assert graded["success"] is None


def test_a_first_reward_that_gave_only_zeros_is_not_taken_for_correctness_in_silence() -> None:
    question = Question(success_reward=None, threshold=1.0, sizes=(1,))
    told = dataset_report(answered(make_sheet([[[0.0]], [[0.0]]]), question), seed=0)
    assert told["metrics"]["avg@1"]["value"] == 0.0
    assert any("gave nothing but 0" in note and "eval.success" in note for note in told["notes"])


def test_sizes_over_other_prompts_are_told() -> None:
    question = Question(success_reward="a", threshold=1.0, sizes=(1, 2))
    gaps = dataset_report(answered(make_sheet([[[1.0], [NOT_APPLIED]], [[0.0], [1.0]]]), question), seed=0)
    assert any("pass@1 over 2, pass@2 over 1" in note for note in gaps["notes"])
    whole = dataset_report(answered(make_sheet([[[1.0], [1.0]], [[0.0], [1.0]]]), question), seed=0)
    assert not any("pass@" in note for note in whole["notes"])


def test_votes_are_counted_by_prompt() -> None:
    answers = (("4", "4", "5"), ("1", "2", "2"), (None, "3", None))
    rewards = [[[1.0], [1.0], [0.0]], [[1.0], [0.0], [0.0]], [[0.0], [1.0], [NOT_APPLIED]]]
    found = values_of(make_sheet(rewards, answers=answers), sizes=(1, 3))
    assert found["maj@3"] == 2 / 3
    assert "maj@3" not in values_of(make_sheet(rewards), sizes=(1, 3)), "without answers there is no vote"


def test_subsets_are_measured_as_if_they_were_all() -> None:
    rewards = np.random.default_rng(1).integers(0, 2, size=(6, 4, 1)).astype(float)
    answers = tuple(("x", "y", "x", "z") for _ in range(6))
    question = Question(success_reward=None, threshold=1.0, sizes=(1, 4), subsets=("b", "a", "b", "b", "a", "b"))
    results = answered(make_sheet(rewards, answers=answers), question)
    assert dict(results.subsets) == {"a": [1, 4], "b": [0, 2, 3, 5]}
    for prompts in results.subsets.values():
        alone = values_of(make_sheet(rewards[list(prompts)], answers=answers[: len(prompts)]), sizes=(1, 4))
        for name in ("reward", "avg@4", "pass@4", "maj@4", "completions/mean_length"):
            assert results.metrics[name].select(prompts).value == alone[name]
