"""Steps of shapes that nobody has thought of: the same run in one process and, with each strategy, in two."""

from typing import Any

import pytest
from e2e.experiment import Experiment, make_experiment
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from many_processes import Job, assert_close, overrides, train_in_forked
from warm_start import WarmStart

from grpo_cli.engine.run import run
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STRATEGIES = ("ddp", "deepspeed_zero3", "fsdp2")

SHAPES = st.fixed_dictionaries(
    {
        "train.prompts_per_step": st.integers(1, 5),
        "grpo.num_generations": st.integers(2, 5),
        "generation.max_completion_length": st.integers(2, 12),
        "train.micro_batch_tokens": st.integers(8, 96),
        "grpo.loss_type": st.sampled_from(["grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]),
        "grpo.beta": st.sampled_from([0.0, 0.1]),
        "train.max_grad_norm": st.sampled_from([0.0, 0.1]),
        "grpo.mask_truncated_completions": st.booleans(),
        "model.share_prefix": st.booleans(),
        "train.seed": st.integers(0, 1000),
    },
    optional={
        "grpo.steps_per_generation": st.integers(2, 3),
        "grpo.num_iterations": st.just(2),
        "model.lora.r": st.integers(1, 3),
        "train.gradient_checkpointing": st.sampled_from([True, False]),
    },
)
"""Groups of any size, budgets that one completion fills or that take all of them."""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Any) -> Experiment:
    made = make_experiment(
        tmp_path_factory.mktemp("experiment"),
        tiny_model_folder,
        train={"max_steps": 5, "learning_rate": 0.001, "overwrite_output_dir": True},
        # Where a run computes something once more than another, the global generators are elsewhere.
        rewards={"reward_funcs": ["my_rewards.few_letters", "my_rewards.Counting"]},
    )
    # Otherwise parameters as small as these would stay whole.
    (made.folder / "zero.json").write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    return made


@given(shapes=st.lists(SHAPES, min_size=3, max_size=3))
@settings(
    max_examples=1,
    deadline=None,
    derandomize=True,  # after another order of sums a token in a million is another, which a test may not meet by chance
    phases=[Phase.generate],  # others would take minutes, and what failed is printed
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_shape_trains_the_same_in_parts(
    warm: WarmStart, experiment: Experiment, shapes: list[dict[str, Any]]
) -> None:
    for number, shape in enumerate(shapes):
        note(f"shape {number}: {' '.join(overrides(shape))}")
        run(
            load_recipe(experiment.recipe, overrides({**shape, "train.output_dir": experiment.output(f"one-{number}")}))
        )
    for strategy in STRATEGIES:
        more = {"distributed.deepspeed_config": "zero.json"} if strategy.startswith("deepspeed") else {}
        jobs: list[Job] = [
            (
                experiment.recipe,
                {
                    **shape,
                    **more,
                    "distributed.strategy": strategy,
                    "train.output_dir": experiment.output(f"{strategy}-{number}"),
                },
                None,
            )
            for number, shape in enumerate(shapes)
        ]
        train_in_forked(warm, 2, jobs)
        for number, _ in enumerate(shapes):
            assert_close(experiment.output(f"{strategy}-{number}"), experiment.output(f"one-{number}"))
