"""What reward functions receive, with the examples of the GRPO reference documentation, and which arguments they get."""

import functools
from typing import Any

import pytest
import torch
from scoring.scoring_groups import STATE, group

from grpo_cli.errors import RewardError
from grpo_cli.metrics import Mean
from grpo_cli.scoring.limits import CallLimits
from grpo_cli.scoring.reward import make_reward
from grpo_cli.scoring.runtime import RewardScorer, Scores


def score(function: Any, *groups: Any) -> Scores:
    scorer = RewardScorer([make_reward("f", function)])
    try:
        return scorer.score(groups, STATE)
    finally:
        scorer.close()


def rewards(scores: Scores) -> list[list[float]]:
    return [scored.rewards[:, 0].tolist() for scored in scores.groups]


@pytest.mark.parametrize("conversational", [False, True])
def test_a_function_with_kwargs_receives_everything(conversational: bool) -> None:
    seen: dict[str, Any] = {}

    def function(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * 3

    score(
        function,
        group(0, "hi", ["a", "bc"], conversational=conversational, answer=7),
        group(1, "yo", ["d"], conversational=conversational, answer=8),
    )
    assert callable(seen.pop("log_extra"))
    assert callable(seen.pop("log_metric"))
    texts = ["a", "bc", "d"]
    assert seen == {
        "prompts": [
            [{"role": "user", "content": prompt}] if conversational else prompt for prompt in ("hi", "hi", "yo")
        ],
        "completions": [[{"role": "assistant", "content": text}] if conversational else text for text in texts],
        "completion_ids": [[97], [98, 99], [100]],
        "completions_ids": [[97], [98, 99], [100]],
        "trainer_state": STATE,
        "answer": [7, 7, 8],
    }


def test_a_function_gets_only_what_it_declares() -> None:
    def function(completions: list[str], answer: list[str], missing: str = "default") -> list[float]:
        return [float(text == right and missing == "default") for text, right in zip(completions, answer, strict=True)]

    assert rewards(score(function, group(0, "p", ["x", "y"], answer="x", other=1))) == [[1.0, 0.0]]


def test_unique_characters_example() -> None:
    def function(completions: list[str], **kwargs: Any) -> list[int]:
        return [len(set(text)) for text in completions]

    assert rewards(score(function, group(0, "p", ["hello", "aaa"]))) == [[4.0, 1.0]]


def test_multitask_example_rows_of_the_other_task_are_nan() -> None:
    def maths(prompts: list[str], completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
        return [1.0 if each == "math" else None for each in task]

    def code(completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
        return [0.5 if each == "code" else None for each in task]

    scorer = RewardScorer([make_reward("maths", maths), make_reward("code", code)])
    scores = scorer.score([group(0, "p", ["a", "b"], task="math"), group(1, "q", ["c", "d"], task="code")], STATE)
    nan = float("nan")
    torch.testing.assert_close(
        torch.stack([scored.rewards for scored in scores.groups]),
        torch.tensor([[[1.0, nan], [1.0, nan]], [[nan, 0.5], [nan, 0.5]]]),
        equal_nan=True,
    )
    assert scores.groups[0].rewards.dtype == torch.float32


def test_a_function_that_never_applies_is_fine() -> None:
    scores = score(lambda completions: [None] * len(completions), group(0, "p", ["a", "b"]))
    assert scores.groups[0].rewards.isnan().all()
    assert not scores.groups[0].dropped


def test_trainer_state_example_shapes_the_reward_by_progress() -> None:
    def function(completions: list[str], trainer_state: Any) -> list[float]:
        return [trainer_state.progress * len(text) + trainer_state.global_step for text in completions]

    assert rewards(score(function, group(0, "p", ["aa"]))) == [[3.5]]


def test_logging_example_goes_to_extras_and_metrics() -> None:
    def function(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("upper", [text.upper() for text in completions])
        log_metric("accuracy", 0.5)
        log_metric("accuracy", torch.tensor(1.0))
        return [0.0] * len(completions)

    scores = score(function, group(0, "p", ["a", "b"]), group(1, "q", ["c"]))
    assert [scored.extras for scored in scores.groups] == [{("f", "upper"): ("A", "B")}, {("f", "upper"): ("C",)}]
    assert scores.metrics["accuracy"] == Mean(0.75 * 3, 3)


@pytest.mark.parametrize("per_prompt", [True, False])
def test_a_share_of_completions_is_the_same_whether_a_function_sees_few_at_a_time_or_all(per_prompt: bool) -> None:
    """Groups of other sizes stand for processes that score other numbers of completions."""

    def function(completions: list[str], log_metric: Any) -> list[float]:
        log_metric("short", sum(len(text) < 3 for text in completions) / len(completions))
        for text in completions:
            log_metric("length", len(text))
        return [0.0] * len(completions)

    scorer = RewardScorer([make_reward("f", function, limits=CallLimits(per_prompt=per_prompt))])
    metrics = scorer.score([group(0, "p", ["a", "bb", "ccc"]), group(1, "q", ["dddd"])], STATE).metrics
    assert metrics["short"].result() == pytest.approx(2 / 4)
    assert metrics["length"].result() == pytest.approx(10 / 4)


@pytest.mark.parametrize("name", ["step", "eval/accuracy", "time/reward/other", 3])
@pytest.mark.parametrize("on_error", ["stop", "drop"])
def test_a_metric_under_a_name_of_the_run_is_an_error_that_stops_it(name: Any, on_error: Any) -> None:
    """No prompt is to blame, so `drop` does not excuse it, and nothing is called again."""
    calls = []
    groups = [group(0, "p", ["a", "b"]), group(1, "q", ["c"])]

    def function(completions: list[str], log_metric: Any) -> list[float]:
        calls.append(len(completions))
        log_metric(name, 1)
        return [0.0] * len(completions)

    with pytest.raises(RewardError) as caught:
        RewardScorer([make_reward("f", function)], on_error=on_error).score(groups, STATE)
    assert str(caught.value) == (
        f"reward function 'f' logged a metric named {name!r}; allowed is any text but 'step' and what begins with 'eval/' "
        "or 'time/'\n  hint: give `log_metric` another name"
    )
    assert calls == [3]


def test_names_that_only_resemble_those_of_the_run_are_allowed() -> None:
    def function(completions: list[str], log_metric: Any) -> list[float]:
        for name in ("steps", "evaluation", "judge/step"):
            log_metric(name, 1)
        return [0.0] * len(completions)

    assert {"steps", "evaluation", "judge/step"} < score(function, group(0, "p", ["a"])).metrics.keys()


def test_a_function_cannot_change_what_the_next_one_sees() -> None:
    def vandal(completions: list[Any], completion_ids: list[list[int]], tag: list[str]) -> list[float]:
        completions[0][0]["content"] = "changed"
        completion_ids[0].clear()
        tag.clear()
        return [0.0]

    def witness(completions: list[Any], completion_ids: list[list[int]], tag: list[str]) -> list[float]:
        return [float(completions[0][0]["content"] == "a" and completion_ids == [[97]] and tag == ["t"])]

    scorer = RewardScorer([make_reward("vandal", vandal), make_reward("witness", witness)])
    scores = scorer.score([group(0, "p", ["a"], conversational=True, tag="t")], STATE)
    assert scores.groups[0].rewards.tolist() == [[0.0, 1.0]]


class Threshold:
    def __init__(self, at: int = 1) -> None:
        self.at = at

    def __call__(self, completions: list[str]) -> list[bool]:
        return [len(text) >= self.at for text in completions]

    def method(self, completions: list[str], **_: Any) -> tuple[float, ...]:
        return tuple(float(len(text) >= self.at) for text in completions)


class AsyncThreshold(Threshold):
    async def __call__(self, completions: list[str]) -> list[bool]:  # type: ignore[override]
        return super().__call__(completions)


async def async_threshold(completions: list[str], at: int, **kwargs: Any) -> list[float]:
    return [float(len(text) >= at) for text in completions]


@pytest.mark.parametrize(
    "function",
    [
        Threshold(2),
        Threshold(2).method,
        AsyncThreshold(2),
        functools.partial(async_threshold, at=2),
        functools.partial(Threshold(2)),
        lambda **kwargs: async_threshold(at=2, **kwargs),
        lambda completions: torch.tensor([len(text) >= 2 for text in completions]),
        lambda completions: torch.tensor([float(len(text) >= 2) for text in completions]).numpy(),
        lambda completions: list(torch.tensor([float(len(text) >= 2) for text in completions])),
    ],
    ids=[
        "object",
        "method",
        "async-object",
        "async-partial",
        "partial",
        "passes-a-coroutine",
        "tensor",
        "array",
        "scalars",
    ],
)
def test_every_kind_of_callable_and_container_works(function: Any) -> None:
    assert rewards(score(function, group(0, "p", ["a", "bb"]), group(1, "q", ["ccc"]))) == [[0.0, 1.0], [1.0]]


def test_a_bound_parameter_wins_over_a_column_of_its_name() -> None:
    def function(completions: list[str], at: int = 0, **kwargs: Any) -> list[float]:
        assert "at" not in kwargs
        return [float(at)] * len(completions)

    assert rewards(score(functools.partial(function, at=5), group(0, "p", ["a"], at=9))) == [[5.0]]
    assert rewards(score(function, group(0, "p", ["a"]))) == [[0.0]]


def test_a_column_that_some_rows_lack_is_none_there() -> None:
    def function(label: list[int | None]) -> list[int | None]:
        return label

    scores = score(function, group(0, "p", ["a"], label=4), group(1, "q", ["b"]))
    assert rewards(scores)[0] == [4.0]
    assert scores.groups[1].rewards.isnan().all()


def test_a_parameter_that_nobody_provides_is_named_with_the_nearest_column() -> None:
    def function(completions: list[str], anwser: list[str]) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError) as caught:
        score(function, group(0, "p", ["a"], answer="x"))
    assert str(caught.value) == (
        "reward function 'f' needs 'anwser', which is neither a dataset column nor given by the trainer; available: answer, "
        "completion_ids, completions, completions_ids, log_extra, log_metric, prompts, trainer_state\n"
        "  hint: did you mean `answer`?"
    )


def test_columns_can_be_checked_before_the_first_rollout() -> None:
    def function(completions: list[str], answer: list[str]) -> list[float]:
        return [0.0]

    scorer = RewardScorer([make_reward("f", function)])
    scorer.check_columns(["prompt", "answer"])
    with pytest.raises(RewardError, match="reward function 'f' needs 'answer'"):
        scorer.check_columns(["prompt", "label"])


def test_the_prompt_column_is_not_passed_under_its_own_name() -> None:
    def function(prompt: list[str]) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError, match="needs 'prompt'") as caught:
        score(function, group(0, "p", ["a"]))
    assert caught.value.hint == "did you mean `prompts`?"


def test_a_callable_that_cannot_take_keywords_is_refused() -> None:
    def function(completions: list[str], /) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError, match="takes 'completions' by position only; arguments are passed by keyword"):
        make_reward("f", function)
    with pytest.raises(RewardError, match="the parameters of <class 'type'> cannot be read"):
        make_reward("f", type)
