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
