"""Warnings about runs that cannot learn come after three generations or steps in a row, and not before."""

import torch

from grpo_cli.engine.health import RunHealth, Signs
from grpo_cli.engine.masked import Masked
from grpo_cli.metrics import Mean
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt, PromptId, ScoredGroup


def scored(rewards: list[list[float]], *reasons: FinishReason) -> ScoredGroup:
    completions = tuple(
        Completion(
            index=index, ids=(1,), logps=torch.zeros(1), text="x", finish_reason=reason, policy_version=PolicyVersion(0)
        )
        for index, reason in enumerate(reasons)
    )
    prompt = Prompt(uid=PromptId("0:0"), ids=(1,), text="p", messages=None, row={})
    return ScoredGroup(group=Group(prompt=prompt, completions=completions), rewards=torch.tensor(rewards), extras={})


def mean_of(*lengths: int) -> Mean:
    return Mean(sum(lengths), len(lengths))


STOP, LENGTH, NAN = FinishReason.STOP, FinishReason.LENGTH, float("nan")
HEALTHY = scored([[0.0], [1.0]], STOP, LENGTH)


def keys_after(*generations: ScoredGroup) -> list[list[str]]:
    health = RunHealth()
    return [[warning.key for warning in health.observe(Signs.of([generation]))] for generation in generations]


def test_a_healthy_run_is_left_alone() -> None:
    assert keys_after(*[HEALTHY] * 5) == [[]] * 5


def test_truncation_of_everything_is_noticed() -> None:
    truncated = scored([[0.0], [1.0]], LENGTH, LENGTH)
    assert keys_after(*[truncated] * 4) == [[], [], ["health/truncated"], ["health/truncated"]]
    assert keys_after(truncated, truncated, HEALTHY, truncated, truncated) == [[]] * 5


def test_no_reward_and_equal_rewards_are_told_apart() -> None:
    unscored = scored([[NAN, NAN], [NAN, NAN]], STOP, STOP)
    equal = scored([[1.0, NAN], [1.0, NAN]], STOP, STOP)
    assert keys_after(*[unscored] * 3)[-1] == ["health/unscored"]
    assert keys_after(*[equal] * 3)[-1] == ["health/equal"]
    assert keys_after(*[scored([[1.0, NAN], [NAN, 1.0]], STOP, STOP)] * 3)[-1] == []


def test_the_count_goes_on_after_a_resume() -> None:
    truncated = scored([[0.0], [1.0]], LENGTH, LENGTH)
    first, second = RunHealth(), RunHealth()
    for _ in range(2):
        first.observe(Signs.of([truncated]))
    second.load_state_dict(first.state_dict())
    assert [warning.key for warning in second.observe(Signs.of([truncated]))] == ["health/truncated"]


def test_much_that_is_masked_is_told_with_its_lengths() -> None:
    much = Masked(lengths=mean_of(400, 300), other_lengths=mean_of(10, 20, 30))
    little = Masked(lengths=mean_of(400), other_lengths=mean_of(10, 20))
    health = RunHealth()
    warnings = [health.observe_masked(step) for step in (much, much, little, much, much, much)]
    assert [len(due) for due in warnings] == [0, 0, 0, 0, 0, 1]
    (warning,) = warnings[-1]
    assert warning.key == "health/masked"
    assert warning.message.startswith(
        "the rollout correction leaves 2 of 5 completions of this step out of the policy term; they have 350 tokens on average, "
        "the others 20: set vllm.importance_sampling_mode to token_truncate"
    )


def test_a_step_without_anything_left_or_anything_to_mask() -> None:
    health = RunHealth()
    assert [health.observe_masked(Masked(lengths=mean_of(), other_lengths=mean_of())) for _ in range(4)] == [[]] * 4
    due = [health.observe_masked(Masked(lengths=mean_of(7), other_lengths=mean_of())) for _ in range(3)][-1]
    assert "leaves 1 of 1 completions of this step out of the policy term: set" in due[0].message
