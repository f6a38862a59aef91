"""The memory estimate against what tensors really take."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig, PreTrainedConfig

from grpo_cli.engine.memory import estimate_memory
from grpo_cli.engine.optimizer import build_optimizer
from grpo_cli.recipe.schema import GenerationSection, TrainSection


def test_weights_gradients_and_optimizer_are_counted_to_the_byte(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    train = TrainSection()
    optimizer = build_optimizer(model, train, device=torch.device("cpu"))
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    estimate = estimate_memory(
        model, train=train, generation=GenerationSection(), sequences=8, longest_prompt=10, with_reference=True
    )

    def size(tensors: list[torch.Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    assert estimate.weights == estimate.reference == size(list(model.parameters()))
    assert estimate.gradients == size([parameter.grad for parameter in model.parameters()])
    assert estimate.optimizer == size(moments)


def test_the_cache_is_that_of_the_sequences_sampled_at_once(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    generation = GenerationSection(max_completion_length=6, max_num_seqs=4)
    estimate = estimate_memory(
        model, train=TrainSection(), generation=generation, sequences=8, longest_prompt=10, with_reference=False
    )
    cache = model(torch.ones(4, 16, dtype=torch.long), use_cache=True).past_key_values
    real = sum(
        tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in (layer.keys, layer.values)
    )
    assert estimate.cache == real


def test_checkpointing_and_smaller_micro_batches_need_less(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)

    def activations(**changes: object) -> int:
        count = estimate_memory(
            model,
            train=TrainSection(**changes),  # type: ignore[arg-type]
            generation=GenerationSection(),
            sequences=64,
            longest_prompt=10,
            with_reference=False,
        ).activations
        assert count is not None
        return count

    assert activations(micro_batch_tokens=512) * 2 == activations(micro_batch_tokens=1024)
    assert activations(gradient_checkpointing=True) < activations()
    assert activations(bf16=True) * 2 == activations()


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
    estimate = estimate_memory(
        model,
        train=TrainSection(),
        generation=GenerationSection(),
        sequences=8,
        longest_prompt=10,
        with_reference=False,
    )
    assert estimate.cache is None
    known = (estimate.weights, estimate.gradients, estimate.optimizer, estimate.activations)
    assert estimate.total == sum(part for part in known if part is not None)


def test_a_configuration_without_sizes_leaves_only_what_the_weights_say(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.config = PreTrainedConfig()
    estimate = estimate_memory(
        model,
        train=TrainSection(),
        generation=GenerationSection(),
        sequences=8,
        longest_prompt=10,
        with_reference=False,
    )
    assert (estimate.activations, estimate.cache) == (None, None)
    assert estimate.total == 4 * estimate.weights
