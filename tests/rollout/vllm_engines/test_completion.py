"""From vLLM's tokens to completions."""

import math
from typing import Any

import pytest

from grpo_cli.rollout.vllm.completion import SampledTokens, completed_group
from grpo_cli.types import FinishReason, PolicyVersion, Prompt

END = 257
"""`<|im_end|>` of the tiny tokenizer, a special token."""


def test_group_has_the_completions_in_order_with_text_of_our_tokenizer(tokenizer: Any, prompts: list[Prompt]) -> None:
    yes, no = tuple(tokenizer("yes")["input_ids"]), tuple(tokenizer("no")["input_ids"])
    sampled = [
        SampledTokens(ids=(*yes, END), logps=(-0.5, -0.25, -0.125, 0.0), finish_reason=FinishReason.STOP),
        SampledTokens(ids=no, logps=(-1.0, -2.0), finish_reason=FinishReason.LENGTH),
    ]
    group = completed_group(prompts[0], sampled, tokenizer=tokenizer, version=PolicyVersion(7))
    assert group.prompt is prompts[0]
    assert [(one.index, one.ids, one.text, one.finish_reason) for one in group.completions] == [
        (0, (*yes, END), "yes", FinishReason.STOP),
        (1, no, "no", FinishReason.LENGTH),
    ]
    assert [one.logps.tolist() for one in group.completions] == [[-0.5, -0.25, -0.125, 0.0], [-1.0, -2.0]]
    assert {one.policy_version for one in group.completions} == {7}


@pytest.mark.parametrize("unknown", [None, math.nan, -math.inf, math.inf, -9999.0])
def test_log_probability_that_vllm_does_not_give_is_nan(tokenizer: Any, prompts: list[Prompt], unknown: Any) -> None:
    sampled = [SampledTokens(ids=(97, 98), logps=(unknown, -9998.0), finish_reason=FinishReason.LENGTH)]
    group = completed_group(prompts[0], sampled, tokenizer=tokenizer, version=PolicyVersion(0))
    first, second = group.completions[0].logps.tolist()
    assert math.isnan(first)
    assert second == -9998.0
