"""How the completions of a step are spread over processes."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.engine.shares import share_of
from grpo_cli.types import PolicyVersion, PromptId, TrainingGroup


def group(prompt: int, lengths: list[int]) -> TrainingGroup:
    return TrainingGroup(
        uid=PromptId("0:0"),
        prompt_ids=(1,) * prompt,
        completion_ids=tuple((2,) * length for length in lengths),
        behaviour_logps=tuple(torch.zeros(length) for length in lengths),
        advantages=torch.ones(len(lengths)),
        in_loss=(True,) * len(lengths),
        policy_version=PolicyVersion(0),
    )


GROUPS = st.lists(
    st.builds(group, st.integers(1, 20), st.lists(st.integers(1, 20), max_size=4)), min_size=1, max_size=4
)


def cost(groups: list[TrainingGroup], indices: list[list[int]], *, shares_prefix: bool) -> int:
    """What a process feeds."""
    return sum(
        len(one.prompt_ids) * (min(len(mine), 1) if shares_prefix else len(mine))
        + sum(len(one.completion_ids[index]) - 1 for index in mine)
        for one, mine in zip(groups, indices, strict=True)
    )


def all_cuts(places: list[tuple[int, int]], count: int) -> list[list[list[tuple[int, int]]]]:
    """Every way to cut a sequence into `count` parts, some of them empty."""
    ends = itertools.combinations_with_replacement(range(len(places) + 1), count - 1)
    return [[places[start:end] for start, end in itertools.pairwise((0, *middle, len(places)))] for middle in ends]


@given(groups=GROUPS, count=st.integers(1, 4), shares_prefix=st.booleans(), data=st.data())
def test_the_dearest_share_is_as_cheap_as_any_cut_allows(
    groups: list[TrainingGroup], count: int, shares_prefix: bool, data: st.DataObject
) -> None:
    active = [
        sorted(
            data.draw(
                st.sets(st.sampled_from(range(len(one.completion_ids)))) if one.completion_ids else st.just(set())
            )
        )
        for one in groups
    ]
    found = [share_of(rank, groups, active, count=count, shares_prefix=shares_prefix) for rank in range(count)]
    for number, one in enumerate(groups):
        owned = [index for share in found for index in share.owned.get(number, ())]
        assert owned == list(range(len(one.completion_ids))), "each once, in order"
        assert [index for share in found for index in share.computed.get(number, ())] == active[number]
    computed = [[list(share.computed.get(number, ())) for number in range(len(groups))] for share in found]
    dearest = max(cost(groups, indices, shares_prefix=shares_prefix) for indices in computed)
    places = [(number, index) for number, indices in enumerate(active) for index in indices]
    best = min(
        max(
            cost(
                groups,
                [[index for at, index in part if at == number] for number in range(len(groups))],
                shares_prefix=shares_prefix,
            )
            for part in cut
        )
        for cut in all_cuts(places, count)
    )
    assert dearest == best
