"""The length of a run against walking through it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.engine.run_length import Done, run_length
from grpo_cli.errors import DataError
from grpo_cli.recipe.schema import GrpoSection, TrainSection


@given(
    rows=st.integers(1, 60),
    prompts_per_step=st.integers(1, 9),
    steps_per_generation=st.integers(1, 4),
    num_iterations=st.integers(1, 3),
    epochs=st.sampled_from([0.3, 1.0, 1.5, 2.0]),
)
def test_epochs_end_when_every_row_was_drawn(
    rows: int, prompts_per_step: int, steps_per_generation: int, num_iterations: int, epochs: float
) -> None:
    rows = max(rows, prompts_per_step)
    train = TrainSection(prompts_per_step=prompts_per_step, num_train_epochs=epochs)
    grpo = GrpoSection(steps_per_generation=steps_per_generation, num_iterations=num_iterations)
    length = run_length(train, grpo, rows=rows)

    assert length.total_prompts is not None
    left, steps = length.total_prompts, 0
    while left > 0:
        drawn = min(left, prompts_per_step * steps_per_generation)
        left -= drawn
        while drawn > 0:
            drawn -= prompts_per_step
            steps += num_iterations
    assert length.total_steps == steps
    assert rows * epochs <= length.total_prompts < rows * epochs + 1


@given(
    rows=st.integers(8, 60),
    prompts_per_step=st.integers(1, 4),
    steps_per_generation=st.integers(1, 4),
    num_iterations=st.integers(1, 3),
    generations=st.integers(0, 5),
)
def test_the_end_is_the_same_seen_from_the_middle(
    rows: int, prompts_per_step: int, steps_per_generation: int, num_iterations: int, generations: int
) -> None:
    train = TrainSection(prompts_per_step=prompts_per_step)
    grpo = GrpoSection(steps_per_generation=steps_per_generation, num_iterations=num_iterations)
    whole = run_length(train, grpo, rows=rows)
    full = prompts_per_step * steps_per_generation
    generations = min(generations, rows // full)
    done = Done(steps=generations * steps_per_generation * num_iterations, prompts=generations * full)
    assert run_length(train, grpo, rows=rows, done=done) == whole


def test_other_steps_after_a_resume_still_draw_every_row() -> None:
    done = Done(steps=4, prompts=32)
    length = run_length(TrainSection(prompts_per_step=4), GrpoSection(), rows=64, done=done)
    assert (length.total_steps, length.total_prompts) == (4 + 8, 64)


def test_max_steps_wins() -> None:
    length = run_length(TrainSection(max_steps=5, prompts_per_step=2), GrpoSection(), rows=100)
    assert (length.total_steps, length.total_prompts) == (5, None)


def test_a_dataset_smaller_than_a_step_is_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"3 usable rows, but train\.prompts_per_step is 4"):
        run_length(TrainSection(prompts_per_step=4), GrpoSection(), rows=3)


def test_a_stream_needs_max_steps() -> None:
    with pytest.raises(DataError) as caught:
        run_length(TrainSection(), GrpoSection(), rows=None)
    assert caught.value.hint == "set train.max_steps"
