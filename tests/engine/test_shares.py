"""How the completions of a step are spread over processes."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.engine.shares import Sizes, share_bounds

Group = tuple[int, list[int]]
"""Tokens of a prompt and of its completions."""

GROUPS = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), max_size=4)), min_size=1, max_size=4)


def sizes_of(groups: list[Group], active: list[list[int]]) -> Sizes:
    rows = [
        (index == 0, prompt, length, index in indices)
        for (prompt, lengths), indices in zip(groups, active, strict=True)
        for index, length in enumerate(lengths)
    ]
    begins, prompts, completions, is_active = torch.tensor(rows, dtype=torch.int64).view(-1, 4).unbind(dim=1)
    return Sizes(begins=begins.bool(), prompts=prompts, completions=completions, active=is_active.bool())


def cost(groups: list[Group], indices: list[list[int]], *, shares_prefix: bool) -> int:
    """What a process feeds."""
    return sum(
        prompt * (min(len(mine), 1) if shares_prefix else len(mine)) + sum(lengths[index] - 1 for index in mine)
        for (prompt, lengths), mine in zip(groups, indices, strict=True)
    )


def all_cuts(places: list[tuple[int, int]], count: int) -> list[list[list[tuple[int, int]]]]:
    """Every way to cut a sequence into `count` parts, some of them empty."""
    ends = itertools.combinations_with_replacement(range(len(places) + 1), count - 1)
    return [[places[start:end] for start, end in itertools.pairwise((0, *middle, len(places)))] for middle in ends]


@given(groups=GROUPS, count=st.integers(1, 4), shares_prefix=st.booleans(), data=st.data())
def test_the_dearest_share_is_as_cheap_as_any_cut_allows(
    groups: list[Group], count: int, shares_prefix: bool, data: st.DataObject
) -> None:
    active = [
        sorted(data.draw(st.sets(st.sampled_from(range(len(lengths)))) if lengths else st.just(set())))
        for _, lengths in groups
    ]
    rows = [(number, index) for number, (_, lengths) in enumerate(groups) for index in range(len(lengths))]
    bounds = share_bounds(sizes_of(groups, active), count=count, shares_prefix=shares_prefix)
    assert len(bounds) == count + 1
    assert (bounds[0], bounds[-1], sorted(bounds)) == (0, len(rows), bounds), "each once, in order"
    shares = [rows[start:end] for start, end in itertools.pairwise(bounds)]
    computed = [
        [[index for at, index in share if at == number and index in active[number]] for number in range(len(groups))]
        for share in shares
    ]
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
