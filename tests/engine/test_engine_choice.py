"""The engine that a recipe names is opened, or it is said why not; and the weights that it is given."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from e2e.experiment import Experiment, make_experiment
from torch import nn
from transformers import AutoModelForCausalLM
from vllm_server import free_port

from grpo_cli.engine.division import count_engines
from grpo_cli.engine.run import run
from grpo_cli.engine.strategies.replicas import NamedWeights
from grpo_cli.engine.vllm_rollouts import _transport
from grpo_cli.errors import TrainingError
from grpo_cli.recipe.load import load_recipe
from grpo_cli.rollout.sync.transports import CudaIpcTransport, ProcessGroupTransport, SharedMemoryTransport


@pytest.fixture
def experiment(tiny_model_folder: Path, tmp_path: Path) -> Experiment:
    return make_experiment(tmp_path, tiny_model_folder)


@pytest.fixture
def unused_port() -> int:
    return free_port()


def test_what_only_vllm_needs_is_not_loaded_without_it() -> None:
    program = (
        "import sys, grpo_cli.engine.run\n"
        "print([name for name in sys.modules if name.startswith(('grpo_cli.rollout.vllm', 'grpo_cli.rollout.sync'))])"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout == "[]\n"


def test_a_server_that_is_not_there_ends_the_run_before_it_begins(
    experiment: Experiment, capsys: pytest.CaptureFixture[str], unused_port: int
) -> None:
    settings = ["vllm.mode=server", f"vllm.server_port={unused_port}", "vllm.server_timeout=1"]
    with pytest.raises(TrainingError) as caught:
        run(load_recipe(experiment.recipe, settings))
    assert caught.value.exit_code == 4
    assert f"http://127.0.0.1:{unused_port}" in caught.value.message
    assert "vllm.server_timeout" in caught.value.message
    assert "grpo vllm-serve" in str(caught.value)
    assert f"waiting for vLLM server http://127.0.0.1:{unused_port}" in capsys.readouterr().out
    assert not experiment.output().exists()


@pytest.mark.parametrize(("processes", "size", "engines"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (6, 3, 2), (4, 4, 1)])
def test_processes_are_cut_into_groups_with_an_engine_each(
    experiment: Experiment, processes: int, size: int, engines: int
) -> None:
    settings = ["vllm.mode=colocate", f"vllm.tensor_parallel_size={size}"]
    assert count_engines(load_recipe(experiment.recipe, settings).recipe.vllm, processes) == engines


def test_an_engine_over_more_processes_than_there_are_ends_the_run_before_it_begins(experiment: Experiment) -> None:
    with pytest.raises(TrainingError) as caught:
        run(load_recipe(experiment.recipe, ["vllm.mode=colocate", "vllm.tensor_parallel_size=2"]))
    assert caught.value.message == (
        "vllm.tensor_parallel_size: found 2, but this run has 1 process, which vllm.mode: colocate spreads each engine over; allowed: 1"
    )
    assert caught.value.hint == "start it with --nproc 2, or a multiple of 2"
    assert not experiment.output().exists()


@pytest.mark.parametrize(
    ("settings", "device", "kind"),
    [
        (["vllm.start=true"], "cuda", CudaIpcTransport),
        (["vllm.start=true", "vllm.weight_transport=process_group"], "cuda", ProcessGroupTransport),
        ([], "cuda", ProcessGroupTransport),
        (["vllm.start=true"], "cpu", SharedMemoryTransport),
    ],
)
def test_weights_for_a_started_server_do_not_travel_between_two_ranks_on_one_gpu(
    experiment: Experiment, settings: list[str], device: str, kind: type
) -> None:
    """NCCL refuses that; a server that somebody else started may well be on another GPU."""
    recipe = load_recipe(experiment.recipe, ["vllm.mode=server", *settings]).recipe
    assert type(_transport(recipe, ["127.0.0.1"], torch.device(device))) is kind


def test_weights_are_given_as_often_as_they_are_asked_for_and_as_they_are_then(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    weights = NamedWeights(model)
    first = {name: tensor.clone() for name, tensor in weights}
    assert first.keys() == model.state_dict().keys() - {"lm_head.weight"}, "the tied head comes once"
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    second = dict(weights)
    assert torch.equal(second["model.embed_tokens.weight"], first["model.embed_tokens.weight"] + 1)
    assert not any(tensor.requires_grad for tensor in second.values())


def test_buffers_are_weights_if_they_are_saved() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("correction", torch.ones(2))
    module.register_buffer("frequencies", torch.ones(2), persistent=False)
    assert dict(NamedWeights(module)).keys() == {"weight", "bias", "correction"}
