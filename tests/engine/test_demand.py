"""What is counted on is no less than what micro-batches really hold."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.engine.batching import micro_batches
from grpo_cli.engine.demand import Demand, fed_tokens
from grpo_cli.types import PolicyLogps, PromptId, TrainingGroup

LONGEST, COMPLETION = 12, 20
CPU = torch.device("cpu")


def group_of(prompt: int, lengths: list[int], number: int) -> TrainingGroup:
    return TrainingGroup(
        uid=PromptId(f"0:{number}"),
        prompt_ids=(0,) * prompt,
        completion_ids=tuple((1,) * length for length in lengths),
        behaviour_logps=tuple(torch.zeros(length) for length in lengths),
        advantages=torch.ones(len(lengths)),
        in_loss=(True,) * len(lengths),
        images=(b"an image",),
    )


shapes_strategy = st.integers(1, 3).flatmap(
    lambda size: st.lists(
        st.tuples(st.integers(1, LONGEST), st.lists(st.integers(1, COMPLETION), min_size=size, max_size=size)),
        min_size=1,
        max_size=6,
    )
)


@given(shapes_strategy, st.integers(1, 150), st.booleans())
def test_no_micro_batch_has_more_image_tokens_than_are_counted(
    shapes: list[tuple[int, list[int]]], budget: int, shared: bool
) -> None:
    """Also where all of a prompt is images, and completions end long before they have to."""
    prompts, size = len(shapes), len(shapes[0][1])
    demand = Demand(
        micro_batch_tokens=budget,
        trained_tokens=fed_tokens(
            prompts=prompts, group=size, longest_prompt=LONGEST, completion=COMPLETION, shares_prefix=shared
        ),
        sampled_sequences=prompts * size,
        longest_prompt=LONGEST,
        with_reference=False,
        image_tokens=prompts * LONGEST * (1 if shared else size),
    )
    tokens = min(max(budget, LONGEST + COMPLETION), demand.trained_tokens)  # as memory is estimated for
    groups = [group_of(prompt, lengths, number) for number, (prompt, lengths) in enumerate(shapes)]
    entries = [PolicyLogps() for _ in groups]
    for batch in micro_batches(groups, entries, micro_batch_tokens=budget, shares_prefix=shared, device=CPU):
        copies = [1 if shared else len(segment.completion_ids) for segment in batch.segments]
        held = sum(len(segment.prompt_ids) * count for segment, count in zip(batch.segments, copies, strict=True))
        assert held <= demand.image_tokens_of(tokens)
