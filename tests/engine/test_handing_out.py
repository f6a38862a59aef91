"""Parts of a window that are put together are the window, and each process gets the part that it trains on."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from engine.test_state import equal
from engine.threaded_processes import ThreadedProcesses, in_threads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_cli.engine.handing_out import brought_together, handed_out, own_share
from grpo_cli.engine.step import GradientPass
from grpo_cli.engine.window import RolloutWindow, by_step, joined, new_window, window_from_state, window_state
from grpo_cli.objective.loss import ObjectiveSettings
from grpo_cli.objective.settings import LossType
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


class CountedIds(tuple[tuple[int, ...], ...]):
    """Token ids of a group that count how often somebody asks how many completions there are."""

    __slots__ = ()
    asked = 0

    def __len__(self) -> int:
        CountedIds.asked += 1
        return super().__len__()


def test_cutting_a_window_into_many_parts_looks_at_each_group_a_few_times(
    make_group: Callable[..., TrainingGroup],
) -> None:
    """One process may hand out to thousands: to walk through all groups for each of them would take minutes."""
    count = 200
    groups = [make_group(1, 2, uid=f"0:{number}") for number in range(count)]
    counted = [replace(group, completion_ids=CountedIds(group.completion_ids)) for group in groups]
    whole = new_window([counted], iterations=1, policy_version=PolicyVersion(0))
    CountedIds.asked = 0
    parts = whole.parts([[range(start, start + 2)] for start in range(0, 2 * count, 2)])
    assert CountedIds.asked <= 3 * count
    assert equal(joined(parts), new_window([groups], iterations=1, policy_version=PolicyVersion(0)))


def gradient_pass(processes: ThreadedProcesses) -> GradientPass:
    unused: Any = None  # nothing is computed
    objective = ObjectiveSettings(loss_type=LossType.DAPO, max_completion_length=4)
    return GradientPass(
        processes=processes, strategy=unused, settings=objective, budget=unused, shares_prefix=True, splits_prompts=True
    )


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
def test_what_processes_are_handed_is_their_share_of_the_whole(
    make_group: Callable[..., TrainingGroup], data: st.DataObject
) -> None:
    """Wherever it was before, in one process or several; and all of it together is the window again."""
    lengths = data.draw(st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=6), label="lengths")
    per_step = data.draw(st.integers(1, len(lengths)), label="prompts per step")
    count = data.draw(st.integers(2, 4), label="processes")
    inner = st.lists(st.integers(0, len(lengths)), min_size=count - 1, max_size=count - 1)
    bounds = [0, *sorted(data.draw(inner, label="held")), len(lengths)]
    groups = [make_group(*sizes, uid=f"0:{number}") for number, sizes in enumerate(lengths)]

    def held(places: range) -> RolloutWindow:
        steps = by_step(groups[places.start : places.stop], places, count=len(groups), prompts_per_step=per_step)
        return window_of([list(step) for step in steps])

    def work(processes: ThreadedProcesses) -> tuple[RolloutWindow, RolloutWindow]:
        gradients = gradient_pass(processes)
        own = handed_out(held(range(*list(pairwise(bounds))[processes.rank])), gradients)
        return own, brought_together(own, processes)

    shares = in_threads(count, work)
    whole = shares[0][1]
    everything = held(range(len(groups)))
    assert equal(whole, everything.part([range(sum(map(len, step))) for step in _completions(everything)]))
    expected = in_threads(count, lambda processes: own_share(whole, gradient_pass(processes)))
    assert all(equal(own, share) for (own, _), share in zip(shares, expected, strict=True))


def test_a_share_of_what_was_read_does_not_keep_the_rest(make_group: Callable[..., TrainingGroup]) -> None:
    """Tensors of a window that a checkpoint held are views of one for all completions."""
    whole = window_of([[make_group(5, uid=f"0:{number}") for number in range(4)]])
    description, tensors = window_state(whole)
    read = window_from_state(description, tensors)
    assert read.groups[0][0].behaviour_logps[0].untyped_storage().nbytes() == 4 * 5 * 4
    for share in in_threads(2, lambda processes: own_share(read, gradient_pass(processes))):
        held = [
            values
            for group, logps in zip(share.groups[0], share.logps[0], strict=True)
            for values in (group.advantages, *group.behaviour_logps, *(logps.old or ()), *(logps.reference or ()))
        ]
        assert len(held) == 2 * 4
        assert all(values.untyped_storage().nbytes() <= 2 * 5 * 4 for values in held)


def _completions(window: RolloutWindow) -> list[list[tuple[tuple[int, ...], ...]]]:
    return [[group.completion_ids for group in step] for step in window.groups]
