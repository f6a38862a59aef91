"""Prompts with images by a real `grpo vllm-serve`: what it samples after them is what the trainer would have, and runs train with it."""

import base64
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
import torch
from e2e.experiment import Experiment, completions, weights
from image_experiments import ROWS, assert_sampled_as_trained, make_image_experiment
from optional_packages import needs_vllm
from safetensors.torch import load_file
from vision_cases import VisionCase
from vision_prompts import SIZES, picture
from vllm_server import TOKEN, VllmServer
from warm_start import WarmStart

from grpo_cli.engine.evaluate import evaluate
from grpo_cli.engine.evaluated_model import evaluated_models
from grpo_cli.engine.run import run
from grpo_cli.errors import TrainingError
from grpo_cli.recipe.load import load_recipe
from grpo_cli.rollout.sync.names import checkpoint_names
from grpo_cli.rollout.sync.transports import SharedMemoryTransport
from grpo_cli.rollout.vllm.client import VllmClient
from grpo_cli.rollout.vllm.fit import Needs
from grpo_cli.rollout.vllm.limits import AFTER_IMAGES
from grpo_cli.rollout.vllm.prompt_images import ImagePrompt
from grpo_cli.rollout.vllm.sampling import sampling_fields
from grpo_cli.rollout.vllm.server_engine import ServerEngine
from grpo_cli.types import Group, PolicyVersion

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture(scope="module")
def it(vision_folder: Callable[[str], Path]) -> VisionCase:
    """A model whose weights the tests change."""
    return VisionCase(vision_folder("qwen2_5_vl"))


def folder_of(it: VisionCase) -> Path:
    return Path(it.model.config._name_or_path)


@pytest.fixture(scope="module")
def served(it: VisionCase, tmp_path_factory: pytest.TempPathFactory, warm_server: WarmStart) -> Iterator[VllmServer]:
    """Started with the model's folder alone."""
    options = ("--max-model-length", "256", "--engine", "max_num_seqs=16")
    with VllmServer(tmp_path_factory.mktemp("log"), folder_of(it), *options, warm=warm_server) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def engine(it: VisionCase, served: VllmServer) -> Iterator[ServerEngine]:
    engine = ServerEngine(
        [VllmClient(served.url, TOKEN, connect_timeout=10, request_timeout=120)],
        it.processor.tokenizer,
        transport=SharedMemoryTransport(),
        bucket_bytes=1 << 18,
        dtype=torch.float32,
        needs=Needs(longest=256, image_options={}),
    )
    engine.wait_until_ready(60)
    yield engine
    engine.close()


def sampled(it: VisionCase, engine: ServerEngine, version: int) -> list[Group]:
    engine.sync(checkpoint_names(it.model, list(it.model.named_parameters())), PolicyVersion(version))
    return engine.generate(it.prompts, it.sampling(), num_generations=3, seed_key=(0,))


def assert_true(it: VisionCase, groups: list[Group]) -> None:
    """The tolerance is that of the tests of text: both sum in float32, in another order."""
    for number, group in enumerate(groups):
        assert len(group.completions) == 3
        for completion in group.completions:
            torch.testing.assert_close(completion.logps, it.plain_logps(number, completion), atol=1e-4, rtol=0)


def test_logps_after_images_are_the_trainers_before_and_after_the_tower_was_trained(
    it: VisionCase, engine: ServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets what the old tower saw even if its pause does not, which in this version of vLLM would be enough."""

    async def pause(client: VllmClient) -> None:
        await client._repeat("POST", "/pause", params={"mode": "wait", "clear_cache": "false"})

    monkeypatch.setattr(VllmClient, "pause", pause)
    groups = sampled(it, engine, 1)
    assert_true(it, groups)
    again = sampled(it, engine, 2)
    assert [[one.ids for one in group.completions] for group in again] == [
        [one.ids for one in group.completions] for group in groups
    ]
    it.move_tower(groups)
    assert_true(it, sampled(it, engine, 3))  # of the same images, which vLLM has encoded before


def test_what_it_does_not_take_is_an_error_and_nothing_is_left_of_it(it: VisionCase, engine: ServerEngine) -> None:
    sampled(it, engine, 4)
    cut = replace(it.prompts[1], ids=it.prompts[1].ids[:-1])
    no_image = replace(it.prompts[1], images=(b"no image",))
    for prompt, sampling, told in (
        (cut, it.sampling(), f"vLLM makes {len(cut.ids) + 1} tokens of it, and the model's processor {len(cut.ids)}"),
        (no_image, it.sampling(), "vLLM does not take its images: an image cannot be read"),
        (it.prompts[1], it.sampling(top_p=2.0), "top_p must be in"),
    ):
        with pytest.raises(TrainingError, match=f"400, prompt {prompt.uid}: .*{told}"):
            engine.generate([prompt], sampling, num_generations=2, seed_key=(0,))
    assert_true(it, sampled(it, engine, 5))


def test_greedy_completions_and_those_that_a_regular_expression_or_a_string_ends(
    it: VisionCase, engine: ServerEngine
) -> None:
    sampled(it, engine, 6)
    (group,) = engine.generate(it.prompts[1:2], it.sampling(temperature=0.0), num_generations=3, seed_key=(0,))
    assert len({completion.ids for completion in group.completions}) == 1
    only_letters = it.sampling(regex="[ab]{4}")
    (group,) = engine.generate(it.prompts[1:2], only_letters, num_generations=3, seed_key=(0,))
    assert all(set(completion.text) <= set("ab") for completion in group.completions)
    (group,) = engine.generate(
        it.prompts[1:2], replace(only_letters, stop_strings=("a",)), num_generations=8, seed_key=(0,)
    )
    assert {completion.text.find("a") for completion in group.completions} <= {
        len(one.text) - 1 for one in group.completions
    } | {-1}


def request(it: VisionCase, *, n: int, **sampling: Any) -> dict[str, Any]:
    """Ask for completions of a prompt with an image, as JSON."""
    asked = ImagePrompt.of(it.prompts[1], it.processor.tokenizer).request()
    images = [base64.b64encode(image).decode() for image in asked["images"]]
    return {**asked, "images": images, **sampling_fields(it.sampling(**sampling), n=n, seed=0)}


def test_values_of_wrong_types_are_refused_before_the_engine_gets_them(it: VisionCase, served: VllmServer) -> None:
    """The engine is another process, which would end at some of them."""
    right = request(it, n=1)
    assert served.ask("POST", AFTER_IMAGES, json=right).status_code == 200
    for name, value in (
        *(("max_tokens", 8.5), ("max_tokens", "8"), ("temperature", "1"), ("stop_token_ids", ["a"]), ("stop", [1])),
        *(("logit_bias", {"a": 1.0}), ("structured_outputs", {"regex": 3})),
    ):
        answer = served.ask("POST", AFTER_IMAGES, json={**right, name: value})
        assert (answer.status_code, "prompt 0:1: Expected" in answer.text) == (400, True), (name, value, answer.text)
    assert served.ask("POST", AFTER_IMAGES, json=right).status_code == 200


@pytest.mark.parametrize("reason", ["other tokens", "too long"])
def test_a_refused_request_leaves_the_next_one_with_its_image_alone(
    it: VisionCase, served: VllmServer, engine: ServerEngine, reason: str
) -> None:
    """vLLM counts an image that it has prepared as sent to its engine, which a refused one never was."""
    sampled(it, engine, 8)
    number, (width, height) = len(reason), SIZES[0]
    image = base64.b64encode(picture(number, width, height)).decode()  # one that it has not seen
    right = {**request(it, n=1), "images": [image]}
    words = list(it.processor.tokenizer.encode("word " * 300))
    wrong = {
        "other tokens": {"prompt": right["prompt"][:-1]},
        "too long": {"prompt": [*right["prompt"], *words], "unexpanded": [*right["unexpanded"], *words]},
    }
    answer = served.ask("POST", AFTER_IMAGES, json={**right, **wrong[reason]})
    assert answer.status_code == 400, answer.text
    answer = served.ask("POST", AFTER_IMAGES, json=right)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] in {"length", "stop"}


def test_what_the_engine_trusts_without_a_look_cannot_be_asked_for(it: VisionCase, served: VllmServer) -> None:
    """The first of these ended it; no prompt of text can ask for them either."""
    right = {**request(it, n=1), "min_tokens": 4}
    private = {
        "_all_stop_token_ids": [1_000_000],
        "extra_args": {"a": 1},
        "output_text_buffer_length": -1,
        "logprobs": None,
    }
    with_backend = {"structured_outputs": {"regex": "[ab]{4}", "_backend": "x"}}
    for more in (private, with_backend):
        answer = served.ask("POST", AFTER_IMAGES, json={**right, **more})
        assert answer.status_code == 200, answer.text
    for seed in (2**64 - 1, -(2**63) - 1):
        answer = served.ask("POST", AFTER_IMAGES, json={**right, "seed": seed})
        assert (answer.status_code, "seed: found" in answer.text) == (400, True), answer.text
    assert served.ask("GET", "/health").status_code == 200


def test_it_stops_sampling_when_its_client_leaves(it: VisionCase, served: VllmServer, engine: ServerEngine) -> None:
    sampled(it, engine, 7)
    endless = request(it, n=128, max_tokens=200, min_tokens=200)  # a quarter of a minute's work
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{served.url}{AFTER_IMAGES}",
            json=endless,
            headers=served.headers,
            timeout=httpx.Timeout(10, read=0.5),
            trust_env=False,
        )
    deadline = time.monotonic() + 4
    while (left := running(served)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == 0


def running(served: VllmServer) -> float:
    """Ask how many completions it samples or has waiting."""
    lines = served.ask("GET", "/metrics").text.splitlines()
    counts = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_")]
    assert counts
    return sum(counts)


@pytest.fixture
def experiment(it: VisionCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    monkeypatch.setenv("GRPO_VLLM_TOKEN", TOKEN)
    return make_image_experiment(tmp_path, folder_of(it))


def train(experiment: Experiment, served: VllmServer, output: str, *settings: str, resume: str | None = None) -> Path:
    """Train with the server."""
    folder = experiment.output(output)
    given = (
        *(f"train.output_dir={folder}", "vllm.mode=server", f"vllm.server_base_urls=[{served.url}]"),
        *("vllm.canary_steps=1", *settings),
    )
    run(load_recipe(experiment.recipe, list(given)), resume=resume)
    return folder


def test_all_weights_are_trained_on_what_it_samples(it: VisionCase, experiment: Experiment, served: VllmServer) -> None:
    output = train(experiment, served, "run", "train.max_steps=3")
    assert_sampled_as_trained(output, 3)
    assert tower_moved(it, output)


def test_a_frozen_tower_stays_as_it_is_and_a_resumed_run_is_one_that_never_stopped(
    it: VisionCase, experiment: Experiment, served: VllmServer
) -> None:
    settings = ("model.freeze=[vision_tower]", "train.save_steps=2", "train.lr_scheduler_type=constant")
    whole = train(experiment, served, "whole", "train.max_steps=4", *settings)
    assert_sampled_as_trained(whole, 4)
    assert not tower_moved(it, whole)
    train(experiment, served, "stopped", "train.max_steps=2", *settings)
    stopped = train(experiment, served, "stopped", "train.max_steps=4", *settings, resume="newest")
    assert texts(stopped) == texts(whole)
    other = weights(stopped)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(tensor, other[name], atol=1e-5, rtol=0)


def test_the_canary_notices_a_tower_whose_weights_went_to_the_wrong_places(
    experiment: Experiment, served: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of its matrices come under each other's name: all that was sent arrives, and texts are completed as before."""
    first, second = (f"visual.blocks.{block}.attn.proj.weight" for block in (0, 1))

    def swapped(model: Any, named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        right = dict(checkpoint_names(model, named))
        one, other = (next(name for name in right if name.endswith(end)) for end in (first, second))
        right[one], right[other] = right[other], right[one]
        return list(right.items())

    monkeypatch.setattr("grpo_cli.rollout.sync.names.checkpoint_names", swapped)
    with pytest.raises(TrainingError, match="does not sample from the trained weights"):
        train(experiment, served, "lied", "train.max_steps=1")


def tower_moved(it: VisionCase, output: Path) -> bool:
    """Tell whether the tower that encodes images is another than before training."""
    (before,) = folder_of(it).glob("*.safetensors")
    after = weights(output)
    tower = {name: tensor for name, tensor in load_file(before).items() if "visual.blocks" in name}
    assert tower
    return not all(torch.equal(tensor, after[name]) for name, tensor in tower.items())


def texts(output: Path) -> list[list[str]]:
    return [[row["completion"] for row in rows] for rows in completions(output).values()]


def test_evaluations_are_those_of_the_built_in_engine(experiment: Experiment, served: VllmServer) -> None:
    settings = [
        "eval.dataset={name: rows/data.jsonl, conversational: true}",
        "eval.temperature=0",
        "eval.num_generations=1",
    ]
    found = []
    server = ["vllm.mode=server", f"vllm.server_base_urls=[{served.url}]"]
    for output, engine in (("local", []), ("served", server)):
        loaded = load_recipe(experiment.recipe, [*settings, *engine])
        evaluate(loaded, evaluated_models([], loaded), output=experiment.output(output), overwrite=False)
        (file,) = experiment.output(output).glob("*/*/completions.parquet")
        found.append([row["completion"] for row in pq.read_table(file).to_pylist()])
    assert len(found[0]) == len(ROWS)
    assert found[0] == found[1]
