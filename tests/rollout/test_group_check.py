"""What is said about a model that the group decoder cannot sample from, and what is left of having asked."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MoshiConfig,
    MptConfig,
    PreTrainedConfig,
    StableLmConfig,
)

from grpo_cli.rollout.local.decoder import evaluating
from grpo_cli.rollout.local.group_cache import NAME
from grpo_cli.rollout.local.group_check import obstacle

SHAPE = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class OfItsOwn(LlamaForCausalLM):  # type: ignore[misc]  # transformers gives it no type
    """As models that bring their own code may be: nothing is handed on."""

    def forward(self, input_ids: Any, position_ids: Any = None, *, use_cache: bool = False) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)


def ask(model: Any) -> str | None:
    with evaluating(model):
        return obstacle(model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MptConfig(vocab_size=260, d_model=32, n_heads=4, n_layers=2), "its attention cannot be exchanged"),
        (MoshiConfig(ffn_dim=64, **SHAPE), "its forward passes no arguments on to its attention"),
        (
            StableLmConfig(intermediate_size=64, num_key_value_heads=4, **SHAPE),
            "its forward passes no arguments on to its attention",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_all_settings_of_attention_come_back(config: PreTrainedConfig, reason: str) -> None:
    """Those of parts that are no models are None, which transformers does not take back."""
    model = AutoModelForCausalLM.from_config(config)

    def settings() -> list[str | None]:
        parts = [getattr(model.config, name) for name in model.config.sub_configs]
        return [part._attn_implementation for part in (model.config, *parts)]

    before = settings()
    assert (None in before) == (len(before) > 1)
    assert ask(model) == reason
    assert settings() == before


def test_a_forward_with_other_arguments_is_told_in_words() -> None:
    assert ask(OfItsOwn(LlamaConfig(intermediate_size=64, **SHAPE))) == "its forward takes arguments of its own"


@pytest.mark.parametrize(("dtype", "noticed"), [("float64", True), ("float32", True), ("bfloat16", False)])
def test_a_small_difference_is_a_rounding_in_reduced_precision_only(dtype: str, *, noticed: bool) -> None:
    """Here one head's outcome is a little larger whenever the model attends by groups."""
    torch.manual_seed(0)
    config = LlamaConfig(intermediate_size=64, initializer_range=0.2, **SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    assert ask(model) is None
    model.model.layers[1].self_attn.o_proj.register_forward_hook(
        lambda _module, _args, output: output * 1.02 if model.config._attn_implementation == NAME else output
    )
    reason = ask(model)
    assert reason is not None if noticed else reason is None
