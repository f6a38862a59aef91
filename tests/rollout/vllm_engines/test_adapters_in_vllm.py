"""vLLM samples with the adapters that it was given, on weights that it was given once."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from colocated import KEY, SEQUENCES, G
from optional_packages import needs_vllm

from grpo_cli.engine.strategies.replicas import NamedWeights
from grpo_cli.errors import TrainingError
from grpo_cli.policy.adapter_weights import AdapterWeights, FrozenWeights, MergedWeights
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_model
from grpo_cli.recipe.schema import LoraSection, ModelSection
from grpo_cli.rollout.sync.adapters import Adapters
from grpo_cli.rollout.vllm.colocate import ColocateEngine
from grpo_cli.types import PolicyVersion, Prompt, Sampling, Segment

pytestmark = [pytest.mark.slow, needs_vllm]

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """The trainer's."""
    section = ModelSection(name_or_path=str(folder), lora=LoraSection(r=4, alpha=6.0))
    return load_model(section, folder=folder)


def train(model: Any, seed: int) -> None:
    """Give the adapters other values."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn_like(parameter))


def adapters_of(model: Any) -> Adapters:
    weights = NamedWeights(model)
    return Adapters(below=FrozenWeights(weights), adapters=AdapterWeights(model, weights), rank=4)


@pytest.fixture(scope="module")
def engine(arguments: dict[str, Any], tokenizer: Any, model: Any) -> Iterator[ColocateEngine]:
    engine = ColocateEngine(
        {**arguments, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "kv_cache_memory_bytes": 1 << 26},
        tokenizer,
        bucket_bytes=1 << 18,
        dtype=None,
        max_num_seqs=SEQUENCES,
        adapters=adapters_of(model),
    )
    yield engine
    engine.close()
    gc.collect()


def difference(engine: ColocateEngine, model: Any, prompts: list[Prompt], sampling: Sampling) -> float:
    """Compare the engine's log-probabilities with the trainer's."""
    groups = engine.generate(prompts, sampling, num_generations=G, seed_key=KEY)
    segments = tuple(
        Segment(prompt_ids=group.prompt.ids, completion_ids=tuple(one.ids for one in group.completions))
        for group in groups
    )
    with torch.no_grad():
        trainer = PolicyModel(model, sampling=sampling)(segments).logps
    return float((torch.cat([one.logps for group in groups for one in group.completions]) - trainer).abs().max())


def test_the_adapters_alone_are_sent_once_the_weights_below_are_there(
    engine: ColocateEngine, model: Any, prompts: list[Prompt], settings: Callable[..., Sampling]
) -> None:
    below = FrozenWeights(NamedWeights(model))
    whole = sum(tensor.nbytes for _, tensor in below)
    adapters = sum(tensor.nbytes for _, tensor in AdapterWeights(model, NamedWeights(model)))
    sizes = []
    for version in range(3):
        train(model, seed=version)
        sizes.append(engine.sync((), PolicyVersion(version)).bytes)
        assert difference(engine, model, prompts, settings()) < TOLERANCE
    assert sizes == [whole + adapters, adapters, adapters]
    train(model, seed=3)
    assert difference(engine, model, prompts, settings()) > 0.1, "the engine's adapters are its own"


@pytest.mark.parametrize("layer", ["model.layers.0.gate", "layers.0.self_attn.q_proj", "model.layers.9.mlp.up_proj"])
def test_an_adapter_where_vllm_has_none_is_refused_and_nothing_is_lost(
    layer: str,
    engine: ColocateEngine,
    model: Any,
    prompts: list[Prompt],
    settings: Callable[..., Sampling],
) -> None:
    engine._adapters = Adapters(
        below=FrozenWeights(NamedWeights(model)),
        adapters=[(f"{layer}.lora_A", torch.zeros(4, 128)), (f"{layer}.lora_B", torch.zeros(128, 4))],
        rank=4,
    )
    try:
        with pytest.raises(TrainingError, match=rf"puts no adapters on {layer}"):
            engine.sync((), PolicyVersion(4))
    finally:
        engine._adapters = adapters_of(model)
    train(model, seed=5)
    engine.sync((), PolicyVersion(5))
    assert difference(engine, model, prompts, settings()) < TOLERANCE


def test_an_engine_without_adapters_takes_merged_weights(
    arguments: dict[str, Any], tokenizer: Any, model: Any, prompts: list[Prompt], settings: Callable[..., Sampling]
) -> None:
    engine = ColocateEngine(
        {**arguments, "kv_cache_memory_bytes": 1 << 26},
        tokenizer,
        bucket_bytes=1 << 18,
        dtype=None,
        max_num_seqs=SEQUENCES,
    )
    try:
        for version in range(2):
            train(model, seed=10 + version)
            engine.sync(MergedWeights(model, NamedWeights(model)), PolicyVersion(version))
            assert difference(engine, model, prompts, settings()) < TOLERANCE
    finally:
        engine.close()
