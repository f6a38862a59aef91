"""Micro-batches: nothing lost, nothing reordered, within the budget."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.engine.batching import micro_batches, step_totals
from grpo_cli.types import PolicyLogps, PromptId, TrainingGroup

CPU = torch.device("cpu")


def group_of(lengths: list[int], prompt_length: int, number: int) -> TrainingGroup:
    first = 1000 * number
    return TrainingGroup(
        uid=PromptId(f"0:{number}"),
        prompt_ids=tuple(range(first, first + prompt_length)),
        completion_ids=tuple(tuple(first + 100 * i + j for j in range(n)) for i, n in enumerate(lengths)),
        behaviour_logps=tuple(torch.arange(n) + first + 100.0 * i for i, n in enumerate(lengths)),
        advantages=torch.tensor([first + 0.5 + i for i in range(len(lengths))]),
        in_loss=tuple(n % 2 == 0 for n in lengths),
    )


groups_strategy = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 6)), min_size=1, max_size=5
)


@given(groups_strategy, st.integers(1, 60), st.booleans())
def test_every_token_comes_back_once_and_in_order(
    shapes: list[tuple[list[int], int]], budget: int, shared: bool
) -> None:
    groups = [group_of(lengths, prompt, number) for number, (lengths, prompt) in enumerate(shapes)]
    logps = [PolicyLogps(old=group.behaviour_logps, reference=None) for group in groups]
    batches = micro_batches(groups, logps, micro_batch_tokens=budget, shares_prefix=shared, device=CPU)

    forwarded = [
        (segment.prompt_ids, ids) for batch in batches for segment in batch.segments for ids in segment.completion_ids
    ]
    assert forwarded == [(group.prompt_ids, ids) for group in groups for ids in group.completion_ids]
    flat = torch.cat([values for group in groups for values in group.behaviour_logps])
    assert torch.equal(torch.cat([batch.tokens.behaviour_logps for batch in batches]), flat)
    old_logps = [batch.tokens.old_logps for batch in batches if batch.tokens.old_logps is not None]
    assert torch.equal(torch.cat(old_logps), flat)
    assert all(batch.tokens.ref_logps is None for batch in batches)
    for batch in batches:
        lengths = [len(ids) for segment in batch.segments for ids in segment.completion_ids]
        assert batch.tokens.sequence.bincount().tolist() == lengths
        assert [bool(mask) for mask in batch.tokens.loss_mask] == [n % 2 == 0 for n in lengths for _ in range(n)]
        assert len(batch.tokens.advantages) == len(lengths)


@given(groups_strategy, st.integers(1, 60), st.booleans())
def test_the_size_stays_within_the_budget(shapes: list[tuple[list[int], int]], budget: int, shared: bool) -> None:
    groups = [group_of(lengths, prompt, number) for number, (lengths, prompt) in enumerate(shapes)]
    for batch in micro_batches(
        groups, [PolicyLogps()] * len(groups), micro_batch_tokens=budget, shares_prefix=shared, device=CPU
    ):
        rows = [len(s.prompt_ids) + len(ids) - 1 for s in batch.segments for ids in s.completion_ids]
        packed = sum(len(s.prompt_ids) + sum(len(ids) - 1 for ids in s.completion_ids) for s in batch.segments)
        is_part = len(batch.segments) == 1 and len(batch.segments[0].completion_ids) < 4
        allowed = max(budget, len(batch.segments[0].prompt_ids) + budget // 4) if shared and is_part else budget
        assert len(rows) == 1 or (packed if shared else len(rows) * max(rows)) <= allowed


@given(groups_strategy, st.integers(1, 60))
def test_only_groups_larger_than_the_budget_are_cut_and_their_prompts_go_on(
    shapes: list[tuple[list[int], int]], budget: int
) -> None:
    groups = [group_of(lengths, prompt, number) for number, (lengths, prompt) in enumerate(shapes)]
    logps = [PolicyLogps()] * len(groups)
    batches = micro_batches(groups, logps, micro_batch_tokens=budget, shares_prefix=True, device=CPU)
    parts: dict[tuple[int, ...], int] = {}
    for batch in batches:
        for segment in batch.segments:
            parts[segment.prompt_ids] = parts.get(segment.prompt_ids, 0) + 1
    for group in groups:
        size = len(group.prompt_ids) + sum(len(ids) - 1 for ids in group.completion_ids)
        assert size > budget or parts[group.prompt_ids] == 1
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        same = following is not None and following.segments[0].prompt_ids == batch.segments[-1].prompt_ids
        assert batch.goes_on == same
        assert not batch.goes_on or len(batch.segments) == 1
    assert not any(
        batch.goes_on
        for batch in micro_batches(
            groups, logps, micro_batch_tokens=budget, shares_prefix=True, splits_prompts=False, device=CPU
        )
    )


def test_totals_count_loss_tokens_and_all_sequences(make_group: Callable[..., TrainingGroup]) -> None:
    totals = step_totals([make_group(3, 5, in_loss=(True, False)), make_group(7, 1)])
    assert totals.completion_tokens == totals.local_tokens == totals.entropy_tokens == 3 + 7 + 1
    assert totals.sequences == 4


def test_half_present_log_probabilities_are_our_mistake(make_group: Callable[..., TrainingGroup]) -> None:
    groups = [make_group(2), make_group(2)]
    logps = [PolicyLogps(old=groups[0].behaviour_logps), PolicyLogps()]
    with pytest.raises(AssertionError):
        micro_batches(groups, logps, micro_batch_tokens=100, shares_prefix=False, device=CPU)
