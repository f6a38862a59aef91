"""What is said about lengths and vocabularies that do not fit, against what the model does with them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build_tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    XGLMConfig,
)

from grpo_cli.errors import ModelError
from grpo_cli.policy.fit import check_fit

POSITIONS = 64
LLAMA = LlamaConfig(vocab_size=260, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
FAMILIES: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=260, n_embd=32, n_layer=1, n_head=2, n_positions=POSITIONS),
    "opt": OPTConfig(
        vocab_size=260,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
    ),
    "gptj": GPTJConfig(vocab_size=260, n_embd=32, n_layer=1, n_head=2, rotary_dim=8, n_positions=POSITIONS),
    "xglm": XGLMConfig(
        vocab_size=260, d_model=32, ffn_dim=32, num_layers=1, attention_heads=2, max_position_embeddings=POSITIONS
    ),
    "llama": LlamaConfig(**{**LLAMA.to_dict(), "max_position_embeddings": POSITIONS}),
    "bloom": BloomConfig(vocab_size=260, hidden_size=32, n_layer=1, n_head=2),
}


def check(model: Any, **changes: Any) -> str | None:
    return check_fit(
        model,
        changes.pop("tokenizer", None) or build_tiny_tokenizer(),
        **{"prompt_ids": (5, 6), "longest_prompt": 8, "max_completion_length": 16, **changes},
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_length_is_refused_exactly_if_the_model_cannot_take_it(family: str) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    assert check(model, longest_prompt=POSITIONS - 16) is None

    def breaks() -> bool:
        try:
            with torch.no_grad():
                model(torch.ones(1, 2 * POSITIONS, dtype=torch.long))
        except (IndexError, RuntimeError):
            return True
        return False

    if breaks():
        message = (
            "model.name_or_path: the longest prompt (112) and generation.max_completion_length (16) make 128 tokens, "
            "the model has 64 positions"
        )
        with pytest.raises(ModelError, match=re.escape(message)):
            check(model, longest_prompt=2 * POSITIONS - 16)
    else:
        warning = check(model, longest_prompt=2 * POSITIONS - 16)
        assert (warning is None) == (family == "bloom")  # its positions have no end


def test_one_token_more_than_the_positions_is_too_long() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["gpt2"])
    with pytest.raises(ModelError, match="make 65 tokens"):
        check(model, longest_prompt=POSITIONS - 15)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
NESTED = {"full_attention": DYNAMIC, "sliding_attention": DEFAULT}


@pytest.mark.parametrize(
    ("kind", "changes", "original"),
    [
        ("longrope", {"rope_parameters": LONGROPE, "max_position_embeddings": 256}, 16),
        ("dynamic", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}, 32),
    ],
)
def test_a_length_from_which_on_other_rows_change_is_refused(kind: str, changes: dict[str, Any], original: int) -> None:
    """The truth: what a model says about a short row beside a row of that many tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**LLAMA.to_dict(), "initializer_range": 0.5, **changes}))
    ids = torch.arange(1, 13)[None]

    @torch.no_grad()
    def beside(length: int) -> torch.Tensor:
        rows = torch.cat([ids, ids.new_full((1, length - ids.shape[1]), 5)], dim=1)
        logits: torch.Tensor = model(rows).logits[:, : ids.shape[1]]
        return logits

    torch.testing.assert_close(beside(original), beside(12))
    assert (beside(original + 1) - beside(12)).abs().max() > 1e-3
    assert check(model, longest_prompt=original - 16) is None
    message = (
        rf"model\.name_or_path: the longest prompt \({original - 15}\) and generation\.max_completion_length \(16\) make "
        rf"{original + 1} tokens; beyond {original} tokens the model's rotary embedding \({kind}\) depends on the longest sequence"
    )
    with pytest.raises(ModelError, match=message) as caught:
        check(model, longest_prompt=original - 15)
    assert "\n" not in caught.value.message
    assert caught.value.hint == "lower generation.max_completion_length or dataset.max_prompt_length"
    # A stream without a bound may have such a prompt, however short completions are.
    message = (
        rf"model\.name_or_path: nothing bounds the prompts of the stream; beyond {original} tokens the model's rotary"
    )
    with pytest.raises(ModelError, match=message) as caught:
        check(model, longest_prompt=None, max_completion_length=4)
    assert caught.value.hint == (
        f"set dataset.max_prompt_length: it and generation.max_completion_length (4) may make {original} tokens"
    )


def test_rotations_are_looked_at_for_each_kind_of_layer_and_without_knowing_the_prompts() -> None:
    config = LlamaConfig(**{**LLAMA.to_dict(), "max_position_embeddings": POSITIONS})
    model = AutoModelForCausalLM.from_config(config)
    config.rope_parameters = NESTED
    assert check(model, longest_prompt=POSITIONS - 16) is None
    with pytest.raises(ModelError, match=r"generation\.max_completion_length \(65\) make 65 tokens; beyond 64"):
        check(model, longest_prompt=None, max_completion_length=POSITIONS + 1)


def test_completions_alone_are_looked_at_when_the_prompts_are_not_known() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"])
    assert check(model, longest_prompt=None, max_completion_length=POSITIONS) is None
    assert check(model, longest_prompt=None, max_completion_length=100) == (
        "generation.max_completion_length (100) make 100 tokens, the model has 64 positions: "
        "beyond them its answers may be poor"
    )


def test_a_tokenizer_with_a_larger_vocabulary_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**LLAMA.to_dict(), "vocab_size": 200}))
    with pytest.raises(ModelError, match=r"model\.tokenizer_name_or_path: .* with id 257, .* for 200 tokens only"):
        check(model)


def test_an_added_token_without_embedding_counts_only_where_it_is_used(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_config(LLAMA)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    assert tokenizer.convert_tokens_to_ids("<|image|>") == 260
    assert check(model, tokenizer=tokenizer) is None
    with pytest.raises(ModelError, match=r"token '<\|image\|>' with id 260, .* for 260 tokens only"):
        check(model, tokenizer=tokenizer, prompt_ids=(5, 260))
    tokenizer.eos_token = "<|image|>"
    with pytest.raises(ModelError, match="id 260"):
        check(model, tokenizer=tokenizer)
