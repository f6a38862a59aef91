"""A stream, which every process reads."""

from pathlib import Path

import pytest
from e2e.experiment import Experiment, make_experiment
from many_processes import assert_close, overrides, train_in_forked
from warm_start import WarmStart

from grpo_cli.engine.run import run
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture
def experiment(tmp_path: Path, tiny_model_folder: Path) -> Experiment:
    return make_experiment(tmp_path, tiny_model_folder, train={"prompts_per_step": 3, "max_steps": 3})


def test_a_stream_that_draws_from_the_global_generators_is_the_same_for_all(
    experiment: Experiment, warm: WarmStart
) -> None:
    """Each process reads it; only what functions draw is a process's own."""
    (experiment.folder / "shuffling.py").write_text(
        "import random\nfrom datasets import IterableDataset\n\n"
        "def made():\n"
        "    for _ in range(9):\n"
        "        words = ['red', 'sea', 'cat', 'dog', 'sun']\n"
        "        random.shuffle(words)\n"
        "        yield from ({'prompt': word} for word in words)\n\n"
        "def rows():\n"
        "    return IterableDataset.from_generator(made)\n"
    )
    settings: dict[str, object] = {"dataset.name": "shuffling.rows", "rewards.reward_funcs": "[my_rewards.few_letters]"}
    outputs = {spread: experiment.output(f"shuffling-{spread}") for spread in (None, False, True)}
    jobs = [
        (experiment.recipe, {**settings, "rewards.spread": spread, "train.output_dir": outputs[spread]}, None)
        for spread in (False, True)
    ]
    train_in_forked(warm, 2, jobs)
    run(load_recipe(experiment.recipe, overrides({**settings, "train.output_dir": outputs[None]})))
    for spread in (False, True):
        assert_close(outputs[spread], outputs[None])
