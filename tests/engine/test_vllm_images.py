"""Runs whose prompts have images, with vLLM in their own process and in a server that they start."""

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.experiment import Experiment, completions
from image_experiments import assert_sampled_as_trained, make_image_experiment
from optional_packages import needs_vllm
from protocol_server import ProtocolServer
from vllm_server import free_port
from warm_server import SERVE
from warm_start import WarmStart

from grpo_cli.engine.run import run
from grpo_cli.errors import ModelError
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, needs_vllm]

SETTINGS = (
    *("train.max_steps=3", "vllm.canary_steps=1", "train.learning_rate=0.01"),
    *("model.lora.r=4", "model.processor_kwargs={size: {shortest_edge: 64, longest_edge: 256}}"),
)


@pytest.fixture
def experiment(vision_folder: Callable[[str], Path], tmp_path: Path) -> Experiment:
    return make_image_experiment(tmp_path, vision_folder("qwen2_5_vl"))


@pytest.mark.parametrize(
    ("takes", "told"),
    [
        (0, "it takes no images, but prompts of this run have some"),
        (1, r"it takes 1 image\(s\) of a prompt, but prompts of this run have up to 2"),
    ],
)
def test_a_server_that_does_not_see_or_not_enough_is_refused_before_the_first_step(
    takes: int, told: str, experiment: Experiment
) -> None:
    with ProtocolServer(max_images=takes) as server:
        settings = ["vllm.mode=server", f"vllm.server_base_urls=[{server.url}]"]
        server.always["/grpo/status"] = lambda right: {**right, "sizes": {}}
        with pytest.raises(ModelError, match=f"{server.url}: {told}"):
            run(load_recipe(experiment.recipe, settings))


@pytest.mark.parametrize("mode", [("vllm.mode=colocate",), ("vllm.mode=server", "vllm.start=true")])
def test_a_limit_of_images_that_prompts_exceed_is_told_before_vllm_starts(
    mode: tuple[str, ...], experiment: Experiment
) -> None:
    settings = [*mode, "vllm.engine={limit_mm_per_prompt: {image: 1}}"]
    with pytest.raises(
        ModelError, match=r"limit_mm_per_prompt: found 1 for image, but prompts of this run have up to 2"
    ):
        run(load_recipe(experiment.recipe, settings))
    assert not list(experiment.folder.rglob("vllm-server.log"))


def test_vllm_samples_what_the_trainer_would_have_in_its_process_and_in_a_server_that_it_starts(
    experiment: Experiment, warm_server: WarmStart
) -> None:
    """With options of the processor and adapters, which go into the weights: larger images take other tokens, which would be an error."""
    started = ("vllm.mode=server", "vllm.start=true", f"vllm.server_port={free_port()}")
    settings = {
        output: [*mode, *SETTINGS, f"train.output_dir={experiment.output(output)}"]
        for output, mode in (("inside", ("vllm.mode=colocate",)), ("started", started))
    }
    run(load_recipe(experiment.recipe, settings["inside"]))
    outcome = warm_server.run("train", experiment.recipe, *settings["started"], program=SERVE, num_spares=1)
    assert outcome.returncode == 0, outcome.stderr
    for output in settings:
        assert_sampled_as_trained(experiment.output(output), 3)
    sampled = [
        [[row["completion"] for row in rows] for rows in completions(experiment.output(output)).values()]
        for output in settings
    ]
    assert sampled[0] == sampled[1]
