"""Rewards of several processes: who calls the functions, what fails, and what each process reads for them."""

from pathlib import Path

import pytest
from e2e.experiment import Experiment, completions, make_experiment, records
from many_processes import SMALL, Launched, assert_close, overrides, train_in_forked
from warm_start import WarmStart

from grpo_cli.engine.run import run
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Experiment:
    return make_experiment(tmp_path_factory.mktemp("experiment"), tiny_model_folder, **SMALL)


def test_processes_that_score_what_they_sampled_train_as_one(experiment: Experiment, warm: WarmStart) -> None:
    """With a scale and a metric of the whole batch, and columns that the main process writes, of the first two prompts.

    Of the 4 prompts of a generation one process has 2, so that its metrics have to count twice.
    """
    (experiment.folder / "measuring.py").write_text(
        "def measuring(completions, log_metric, **_):\n"
        "    lengths = [len(text) for text in completions]\n"
        "    log_metric('characters', sum(lengths) / len(lengths))\n"
        "    return [0.01 * length for length in lengths]\n"
    )
    settings: dict[str, object] = {
        "rewards.spread": True,
        "rewards.reward_funcs": "[my_rewards.few_letters, my_rewards.early, measuring.measuring]",
        "logging.num_completions_to_log": 4,
        "train.max_steps": 3,
        "train.prompts_per_step": 2,
        "grpo.scale_rewards": "batch",
        "grpo.num_iterations": 2,
        "grpo.steps_per_generation": 2,
    }
    alone, three = experiment.output("one-spread"), experiment.output("three-spread")
    run(load_recipe(experiment.recipe, overrides({**settings, "rewards.spread": False, "train.output_dir": alone})))
    train_in_forked(warm, 3, [(experiment.recipe, {**settings, "train.output_dir": three}, None)])
    assert_close(three, alone)
    found, expected = completions(three), completions(alone)
    for name, rows in expected.items():
        assert [(row["answer"], row["prompt"]) for row in found[name]] == [
            (row["answer"], row["prompt"]) for row in rows
        ]
        assert len(rows) == 6


def test_prompts_that_are_dropped_in_one_process_are_in_none(experiment: Experiment, warm: WarmStart) -> None:
    """Whoever scores them; of the steps that share a generation, some have fewer prompts then."""
    (experiment.folder / "picky.py").write_text(
        "def picky(prompts, completions, **_):\n"
        "    assert not any(prompt.startswith(('red', 'sea', 'cat')) for prompt in prompts)\n"
        "    return [0.1 * len(text) for text in completions]\n"
    )
    settings: dict[str, object] = {
        "rewards.reward_funcs": "[my_rewards.few_letters, picky.picky]",
        "rewards.on_error": "drop",
        "grpo.steps_per_generation": 2,
        "grpo.beta": 0.1,
        "train.max_steps": 4,
    }
    alone = experiment.output("one-dropped")
    run(load_recipe(experiment.recipe, overrides({**settings, "train.output_dir": alone})))
    assert records(alone)[0]["rewards/dropped_prompts"] > 0
    places = {spread: experiment.output(f"two-dropped-{spread}") for spread in (False, True)}
    jobs = [
        (experiment.recipe, {**settings, "rewards.spread": spread, "train.output_dir": place}, None)
        for spread, place in places.items()
    ]
    train_in_forked(warm, 2, jobs)
    for place in places.values():
        assert_close(place, alone)


def test_a_reward_that_fails_in_another_process_is_told_once_and_ends_all(
    experiment: Experiment, warm: WarmStart
) -> None:
    module = experiment.folder / "fragile.py"
    module.write_text(
        "import os\n\ndef fragile(completions, **_):\n    assert os.environ['RANK'] == '0', 'not here'\n    return [0.0] * len(completions)\n"
    )
    launched = Launched(
        experiment,
        "fragile",
        "rewards.spread=true",
        "rewards.reward_funcs=[fragile.fragile]",
        "train.max_steps=1",
        warm=warm,
    )
    code, _, errors = launched.end()
    assert code == 3
    assert errors.count("reward function 'fragile' raised AssertionError: not here") == 1
    assert "Traceback" not in errors


def test_a_row_that_one_process_cannot_read_ends_all_with_what_was_trained(
    experiment: Experiment, warm: WarmStart
) -> None:
    """With spread rewards and nothing to record, the main process does not read it; and to save what is cut into parts takes all."""
    (experiment.folder / "fading.py").write_text(
        "import os\nfrom pathlib import Path\nfrom datasets import Dataset\n\n"
        "GONE = Path(__file__).with_name('gone')\n\n"
        "def rows():\n"
        "    return Dataset.from_dict({'prompt': ['red', 'sea', 'cat', 'dog']}).with_transform(fade)\n\n"
        "def fade(batch):\n"
        "    gone = os.environ['RANK'] == '1' and GONE.exists()\n"
        "    return {name: ['' if gone else value for value in values] for name, values in batch.items()}\n\n"
        "def fading(completions, **_):\n"
        "    GONE.touch()\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    launched = Launched(
        experiment,
        "fading",
        *("dataset.name=fading.rows", "rewards.reward_funcs=[fading.fading]", "rewards.spread=true"),
        *("logging.log_completions=false", "train.prompts_per_step=2", "distributed.strategy=fsdp2"),
        warm=warm,
    )
    code, output, errors = launched.end()
    assert code == 2, (output, errors)
    assert errors.count("gave a prompt when all rows were read, and now prompt is empty") == 1
    assert "Traceback" not in errors
    assert (launched.output / "checkpoints" / "step-000001").is_dir()


def test_a_reward_with_a_state_is_not_spread(experiment: Experiment, warm: WarmStart) -> None:
    launched = Launched(experiment, "stateful", "rewards.spread=true", warm=warm)
    code, _, errors = launched.end()
    assert code == 3
    assert errors.count("rewards.spread: found true, but reward 'Counting' has a state") == 1


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
