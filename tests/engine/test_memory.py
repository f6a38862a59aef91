"""The memory estimate against what tensors really take."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig, PreTrainedConfig

from grpo_cli.engine import memory
from grpo_cli.engine.demand import Demand
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.memory import (
    LEAST_TOKENS,
    MOST_TOKENS,
    automatic_micro_batch_tokens,
    estimate_memory,
)
from grpo_cli.engine.memory_estimate import MemoryEstimate
from grpo_cli.engine.optimizer import build_optimizer
from grpo_cli.engine.strategies.spread import spread_of
from grpo_cli.policy.checkpointing import Checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_model
from grpo_cli.recipe.schema import GenerationSection, LoraSection, ModelSection, TrainSection
from grpo_cli.sharding import whole_bytes
from grpo_cli.types import Sampling

CPU = torch.device("cpu")
PROCESSES = Processes(bf16=False)
ALONE = spread_of("ddp", 1)


def policy_of(model: Any) -> PolicyModel:
    return PolicyModel(model, sampling=Sampling(stop_ids=(257,), max_tokens=8))


def estimated(policy: PolicyModel, train: TrainSection | None = None, **changes: Any) -> MemoryEstimate:
    """The estimate for a small run."""
    run = {"micro_batch_tokens": 100, "trained_tokens": 2112, "longest_prompt": 10, "with_reference": False}
    asked = {name: changes.pop(name) for name in [*changes] if name in Demand.__dataclass_fields__}
    asked = {**run, **asked}
    demand = Demand(**{"sampled_sequences": 8, **asked})
    return estimate_memory(
        policy,
        **{
            "train": train or TrainSection(),
            "generation": GenerationSection(),
            "spread": ALONE,
            "device": CPU,
            "demand": demand,
            **changes,
        },
    )


def test_weights_gradients_and_optimizer_are_counted_to_the_byte(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    train = TrainSection()
    optimizer = build_optimizer(model, train, device=CPU)
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    estimate = estimated(policy_of(model), train, with_reference=True)

    def size(tensors: list[torch.Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    assert estimate.weights == estimate.reference == size(list(model.parameters()))
    assert estimate.gradients == size([parameter.grad for parameter in model.parameters()])
    assert estimate.optimizer == size(moments)


def test_the_cache_is_that_of_the_sequences_sampled_at_once(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    generation = GenerationSection(max_completion_length=6, max_num_seqs=4)
    estimate = estimated(policy_of(model), generation=generation)
    cache = model(torch.ones(4, 16, dtype=torch.long), use_cache=True).past_key_values
    real = sum(
        tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in (layer.keys, layer.values)
    )
    assert estimate.cache == real


def test_vllm_has_a_cache_of_its_own_and_keeps_its_memory_all_the_time(tiny_model_folder: Path) -> None:
    policy = policy_of(AutoModelForCausalLM.from_pretrained(tiny_model_folder))
    without, elsewhere, here = estimated(policy), estimated(policy, vllm=0), estimated(policy, vllm=1 << 30)
    assert without.cache
    assert (without.vllm, elsewhere.cache, elsewhere.vllm, here.vllm) == (0, 0, 0, 1 << 30)
    assert here.total == elsewhere.total + (1 << 30)


def test_checkpointing_and_smaller_micro_batches_need_less(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, num_layers=8))

    def activations(micro_batch_tokens: int = 2048, **changes: Any) -> int:
        train = TrainSection(**changes)
        count = estimated(
            policy_of(model), train, micro_batch_tokens=micro_batch_tokens, trained_tokens=2**20
        ).activations
        assert count is not None
        return count

    assert activations(micro_batch_tokens=512) * 2 == activations(micro_batch_tokens=1024)
    assert activations(gradient_checkpointing=True) < activations(gradient_checkpointing=False)
    assert activations() == activations(gradient_checkpointing="selective") < activations(gradient_checkpointing=False)
    assert activations() / 2 < activations(bf16=True) < activations()  # norms compute in float32


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1),
        Mamba2Config(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16),
    ],
    ids=lambda config: str(config.model_type),
)
def test_a_model_without_attention_heads_has_an_unknown_cache(config: PreTrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(config)
    estimate = estimated(policy_of(model))
    assert estimate.cache is None
    known = (estimate.weights, estimate.gradients, estimate.optimizer, estimate.activations, estimate.head)
    assert estimate.total == sum(part for part in known if part is not None)


def test_a_configuration_without_sizes_leaves_only_what_the_weights_say(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.config = PreTrainedConfig()
    estimate = estimated(policy_of(model))
    assert (estimate.activations, estimate.head, estimate.cache) == (None, None, None)
    assert estimate.total == 4 * estimate.weights


@pytest.mark.parametrize("frozen", [False, True])
def test_a_gpu_rounds_the_head_under_autocast(tmp_path: Path, *, frozen: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, num_layers=1, tied=False))
    model.get_output_embeddings().weight.requires_grad_(not frozen)
    train, size = TrainSection(bf16=True), model.get_output_embeddings().weight.numel()
    on_gpu, on_cpu = (
        estimated(policy_of(model), train, device=torch.device(kind), micro_batch_tokens=1, trained_tokens=1).head
        for kind in ("cuda", "cpu")
    )
    assert on_gpu is not None
    assert on_cpu is not None
    assert on_gpu - on_cpu == 2 * size


def needed(policy: PolicyModel, tokens: int, train: TrainSection) -> int:
    """What the rest of a run needs when nothing but the weights is there: gradients, two moments, one micro-batch."""
    estimate = estimated(policy, train, micro_batch_tokens=tokens, trained_tokens=2**30)
    assert estimate.activations is not None
    assert estimate.head is not None
    return estimate.gradients + estimate.optimizer + 2 * (estimate.activations + estimate.head)


@pytest.mark.parametrize("full_logits", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_the_automatic_budget_is_the_largest_that_takes_half_of_what_will_be_left(
    checkpointing: Checkpointing, full_logits: bool, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(AutoModelForCausalLM.from_pretrained(tiny_model_folder))
    policy.full_logits = full_logits
    train = TrainSection(gradient_checkpointing=checkpointing)

    def found(free: int | None) -> int:
        monkeypatch.setattr(memory, "free_memory", lambda _: free)
        return automatic_micro_batch_tokens(policy, train=train, processes=PROCESSES, spread=ALONE)

    assert found(needed(policy, 512, train)) == 512
    assert found(needed(policy, 512, train) - 1) == 256
    assert found(2**50) == found(None) == MOST_TOKENS["cpu"]
    assert found(0) == LEAST_TOKENS


def test_frozen_weights_need_no_gradients_and_moments(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(AutoModelForCausalLM.from_pretrained(tiny_model_folder))
    train = TrainSection()
    free = needed(policy, 512, train) - 1
    monkeypatch.setattr(memory, "free_memory", lambda _: free)
    assert automatic_micro_batch_tokens(policy, train=train, processes=PROCESSES, spread=ALONE) == 256
    policy.model.get_input_embeddings().requires_grad_(requires_grad=False)
    assert automatic_micro_batch_tokens(policy, train=train, processes=PROCESSES, spread=ALONE) == 512


def test_a_model_of_unknown_size_gets_the_most_tokens(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(AutoModelForCausalLM.from_pretrained(tiny_model_folder))
    policy.model.config = PreTrainedConfig()
    monkeypatch.setattr(memory, "free_memory", lambda _: 2**30)
    assert (
        automatic_micro_batch_tokens(policy, train=TrainSection(), processes=PROCESSES, spread=ALONE)
        == MOST_TOKENS["cpu"]
    )


def test_deepspeed_rounds_weights_to_bfloat16_but_not_those_in_fewer_bits(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, hidden_size=64)
    section = ModelSection(name_or_path=str(folder), lora=LoraSection(r=2), quantization="8bit")
    # What DeepSpeed does.
    really = sum(whole_bytes(one) for one in policy_of(load_model(section, folder=folder)).bfloat16().parameters())
    policy = policy_of(load_model(section, folder=folder))
    found = estimated(policy, TrainSection(bf16=True), spread=spread_of("deepspeed_zero2", 2)).weights
    assert found == really
