"""Run state, optimizer and random generators: what is written is what is read, without pickles."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from grpo_cli.engine.checkpoint_store import BestCheckpoint
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.optimizer import build_optimizer, build_schedule, continue_schedule
from grpo_cli.engine.randomness import RandomState, own_randomness
from grpo_cli.engine.state import RunState, read_optimizer, read_state, write_optimizer, write_state
from grpo_cli.engine.strategies.replicas import Replicas
from grpo_cli.engine.window import RolloutWindow, by_step
from grpo_cli.errors import CheckpointError
from grpo_cli.recipe.schema import TrainSection
from grpo_cli.types import PolicyLogps, PolicyVersion, TrainingGroup

T = TypeVar("T")


def equal(mine: object, theirs: object) -> bool:
    """Compare values that hold tensors."""
    if isinstance(mine, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, tuple):
        return isinstance(theirs, tuple) and len(mine) == len(theirs) and all(map(equal, mine, theirs))
    if isinstance(mine, dict):
        return (
            isinstance(theirs, dict) and mine.keys() == theirs.keys() and all(equal(mine[k], theirs[k]) for k in mine)
        )
    if hasattr(mine, "__dataclass_fields__"):
        return all(equal(getattr(mine, f.name), getattr(theirs, f.name)) for f in fields(mine))  # type: ignore[arg-type]
    return mine == theirs


def steps(values: Sequence[T], each: int) -> tuple[tuple[T, ...], ...]:
    return by_step(values, range(len(values)), count=len(values), prompts_per_step=each)


@pytest.mark.parametrize("with_old", [(True, True, True), (False, False, True), (False, False, False)])
@pytest.mark.parametrize("with_reference", [True, False])
def test_a_window_survives_a_checkpoint(
    with_old: tuple[bool, ...], with_reference: bool, make_group: Callable[..., TrainingGroup], tmp_path: Path
) -> None:
    groups = [
        make_group(3, 1, uid="0:1", in_loss=(False, True)),
        make_group(2, 2, uid="0:2", prompt_length=5),
        make_group(4),
    ]
    logps = [
        PolicyLogps(
            old=group.behaviour_logps if present else None,
            reference=tuple(values - 1 for values in group.behaviour_logps) if with_reference else None,
        )
        for group, present in zip(groups, with_old, strict=True)
    ]
    window = RolloutWindow(
        groups=steps(groups, 2), logps=steps(logps, 2), iterations=3, policy_version=PolicyVersion(4)
    )
    state = RunState(
        step=7,
        evaluated=True,
        window=window,
        whole_window=window,
        position=4,
        num_tokens=99,
        prompts_drawn=12,
        best=BestCheckpoint(step=5, metric="eval/reward", value=0.25),
        stages={"prompts": {"epoch": 1, "position": 2}},
        random=RandomState.capture(),
    )
    write_state(state, tmp_path)
    assert equal(read_state(tmp_path), state)
    assert state.window is not None
    assert state.window.length == 6


def test_a_window_whose_later_steps_were_dropped_survives_a_checkpoint(
    make_group: Callable[..., TrainingGroup], tmp_path: Path
) -> None:
    groups = [make_group(3), make_group()]
    logps = ((PolicyLogps(),), (PolicyLogps(old=()),))
    window = RolloutWindow(groups=steps(groups, 1), logps=logps, iterations=1, policy_version=PolicyVersion(4))
    state = RunState(window=window, whole_window=window, position=1, random=RandomState.capture())
    write_state(state, tmp_path)
    assert equal(read_state(tmp_path), state)


def test_images_of_a_window_survive_a_checkpoint_and_stand_in_it_once(
    make_group: Callable[..., TrainingGroup], tmp_path: Path
) -> None:
    images = [random.Random(number).randbytes(length) for number, length in enumerate((10_000, 1, 777))]
    of_groups = [(images[2], images[0]), (), (images[0],), (images[1], images[1])]
    groups = [replace(make_group(2), images=mine) for mine in of_groups]
    logps = [PolicyLogps()] * 4
    window = RolloutWindow(
        groups=steps(groups, 2), logps=steps(logps, 2), iterations=1, policy_version=PolicyVersion(4)
    )
    write_state(RunState(window=window, whole_window=window, random=RandomState.capture()), tmp_path)
    read = read_state(tmp_path).window
    assert read is not None
    assert [group.images for step in read.groups for group in step] == of_groups
    assert sum(path.read_bytes().count(images[0]) for path in tmp_path.rglob("*") if path.is_file()) == 1


def test_the_old_log_probabilities_of_one_step_can_be_set(make_group: Callable[..., TrainingGroup]) -> None:
    groups = [make_group(3, 1), make_group(2), make_group(4)]
    reference = [PolicyLogps(reference=group.behaviour_logps) for group in groups]
    window = RolloutWindow(
        groups=steps(groups, 2), logps=steps(reference, 2), iterations=2, policy_version=PolicyVersion(4)
    )
    old = [tuple(values - 1 for values in group.behaviour_logps) for group in groups]
    changed = window.with_old(0, old[:2])
    assert equal(changed.logps[0], tuple(replace(reference[number], old=old[number]) for number in (0, 1)))
    assert equal(changed.logps[1], window.logps[1])
    assert equal(changed.groups, window.groups)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint of this version"):
        read_state(tmp_path)


def test_random_generators_continue_where_they_were() -> None:
    state = RandomState.capture()
    first = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002
    state.restore()
    second = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])


def test_own_randomness_changes_nothing_outside_and_repeats_itself() -> None:
    before = RandomState.capture()
    drawn = []
    for _ in range(2):
        with own_randomness(3):
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))  # noqa: NPY002
    assert drawn[0] == drawn[1]
    after = RandomState.capture()
    assert (before.python, before.numpy) == (after.python, after.numpy)
    assert torch.equal(before.torch["cpu"], after.torch["cpu"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: object, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()
        schedule.step()  # type: ignore[attr-defined]
        optimizer.zero_grad()


FILE = "optimizer.safetensors"


def strategy_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Replicas:
    strategy = Replicas(Processes(bf16=False))
    strategy.prepare(model, optimizer, max_grad_norm=0)
    return strategy


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, Mapping[str, torch.Tensor]]:
    return dict(strategy_of(model, optimizer).optimizer_states())


def restore_states(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    shapes = [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
    strategy_of(model, optimizer).load_optimizer_states(read_optimizer(folder, shapes))


def test_an_optimizer_restored_in_the_middle_gives_the_same_bits(tmp_path: Path) -> None:
    section = TrainSection(learning_rate=0.1, weight_decay=0.1, warmup_steps=2, lr_scheduler_type="cosine")

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = build_optimizer(model, section, device=torch.device("cpu"))
        return model, optimizer, build_schedule(optimizer, section, total_steps=10)

    whole, optimizer, schedule = fresh()
    train(whole, optimizer, schedule, 8)

    first, optimizer, schedule = fresh()
    train(first, optimizer, schedule, 3)
    write_optimizer(states_of(first, optimizer), tmp_path / FILE)
    weights, rate = first.state_dict(), schedule.get_last_lr()
    second, optimizer, schedule = fresh()
    second.load_state_dict(weights)
    restore_states(second, optimizer, tmp_path)
    continue_schedule(schedule, steps=3)
    assert schedule.get_last_lr() == rate
    train(second, optimizer, schedule, 5)

    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    section = TrainSection()
    model = nn.Linear(4, 3)
    optimizer = build_optimizer(model, section, device=torch.device("cpu"))
    train(model, optimizer, build_schedule(optimizer, section, total_steps=2), 1)
    write_optimizer(states_of(model, optimizer), tmp_path / FILE)
    smaller = nn.Linear(4, 3, bias=False)
    other = build_optimizer(smaller, section, device=torch.device("cpu"))
    with pytest.raises(CheckpointError, match="does not fit this recipe's model"):
        restore_states(smaller, other, tmp_path)


@pytest.mark.parametrize("kind", get_args(get_type_hints(TrainSection)["lr_scheduler_type"]))
def test_a_schedule_continued_anywhere_gives_the_same_rates(kind: Any) -> None:
    section = TrainSection(learning_rate=0.013, lr_scheduler_type=kind, warmup_steps=0 if kind == "constant" else 3)
    model, steps = nn.Linear(2, 2), 8

    def rates(done: int) -> list[list[float]]:
        optimizer = build_optimizer(model, section, device=torch.device("cpu"))
        schedule = build_schedule(optimizer, section, total_steps=steps)
        continue_schedule(schedule, steps=done)
        found = []
        for _ in range(done, steps):
            assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
            found.append([float(rate) for rate in schedule.get_last_lr()])
            optimizer.step()
            schedule.step()
        return found

    whole = rates(0)
    assert all(rates(done) == whole[done:] for done in range(steps))


def test_a_changed_learning_rate_is_the_one_that_counts_after_a_resume(tmp_path: Path) -> None:
    before, after = TrainSection(learning_rate=0.1, weight_decay=0.1), TrainSection(learning_rate=0.01)
    model = nn.Linear(4, 3)
    optimizer = build_optimizer(model, before, device=torch.device("cpu"))
    train(model, optimizer, build_schedule(optimizer, before, total_steps=10), 3)
    write_optimizer(states_of(model, optimizer), tmp_path / FILE)
    optimizer = build_optimizer(model, after, device=torch.device("cpu"))
    schedule = build_schedule(optimizer, after, total_steps=10)
    restore_states(model, optimizer, tmp_path)
    continue_schedule(schedule, steps=3)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (pytest.approx(0.007), 0.0)
    ] * 2
    assert all(state["step"] == 3 for state in optimizer.state.values())


def test_only_matrices_decay() -> None:
    optimizer = build_optimizer(nn.Linear(4, 3), TrainSection(weight_decay=0.5), device=torch.device("cpu"))
    decays = {
        parameter.ndim: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]
    }
    assert decays == {2: 0.5, 1: 0.0}
