"""Parts of a window that are put together are the window."""

from collections.abc import Callable
from dataclasses import replace

import torch
from engine.test_state import equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_cli.engine.window import RolloutWindow, joined, new_window
from grpo_cli.types import PolicyLogps, PolicyVersion, TrainingGroup


def window_of(groups: list[list[TrainingGroup]]) -> RolloutWindow:
    bare = new_window(groups, iterations=2, policy_version=PolicyVersion(3))
    entries = [
        [
            (
                group,
                PolicyLogps(old=group.behaviour_logps, reference=tuple(values - 1 for values in group.behaviour_logps)),
            )
            for group in step
        ]
        for step in groups
    ]
    return bare.of_entries(entries)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_parts_in_their_order_make_the_whole(make_group: Callable[..., TrainingGroup], data: st.DataObject) -> None:
    """Wherever steps are cut, also within a group, and whether or not a part is empty."""
    lengths = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), max_size=3)
    groups = [
        [make_group(*sizes, uid=f"{step}:{number}") for number, sizes in enumerate(data.draw(lengths))]
        for step in range(2)
    ]
    whole = window_of(groups)
    sizes = [sum(len(group.completion_ids) for group in step) for step in groups]
    cuts = [sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2))) for size in sizes]
    bounds = [[0, *cut, size] for cut, size in zip(cuts, sizes, strict=True)]
    parts = [whole.part([range(each[part], each[part + 1]) for each in bounds]) for part in range(3)]
    assert equal(joined(parts), whole)
    counts = [[sum(len(group.completion_ids) for group in step) for step in part.groups] for part in parts]
    assert counts == [[each[part + 1] - each[part] for each in bounds] for part in range(3)]


def test_a_group_without_completions_is_in_no_part(make_group: Callable[..., TrainingGroup]) -> None:
    gone = replace(make_group(2), completion_ids=(), behaviour_logps=(), in_loss=(), advantages=torch.empty(0))
    kept = make_group(3, 1, uid="0:1")
    whole = window_of([[gone, kept]])
    assert [group.uid for group in whole.part([range(2)]).groups[0]] == ["0:1"]
