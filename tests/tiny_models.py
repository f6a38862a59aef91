"""Tiny random causal language models, saved as ordinary folders, for every test that needs a real model.

They have what real families have (grouped-query attention, tied heads, soft-caps, sliding windows) at a size that loads in
milliseconds. Their weights are large enough that next-token distributions are far from flat.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "mistral",
    "phi3",
    "smollm3",
    "olmo2",
    "granite",
    "cohere",
    "qwen3_moe",
)
SLIDING_WINDOW = 8
"""Window of the families that have one: shorter than most test prompts."""

_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "mistral": MistralConfig,
    "phi3": Phi3Config,
    "smollm3": SmolLM3Config,
    "olmo2": Olmo2Config,
    "granite": GraniteConfig,
    "cohere": CohereConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "gpt2": GPT2Config,  # not among the families: it cannot share a prompt
    "opt": OPTConfig,  # with layers around its decoder's
}
_SPECIALS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "initializer_range": 0.3, "sliding_window": SLIDING_WINDOW},
    "gemma3": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "initializer_range": 0.3,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {"sliding_window": SLIDING_WINDOW},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.7, "embedding_multiplier": 1.5},
    "cohere": {"logit_scale": 0.3},
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 64},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|pad|>", "<|endoftext|>")
"""Ids 256..259. The last one is unused; the tokenizer class of Qwen2 would add it."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 0..255), then `SPECIAL_TOKENS`, with `<|im_end|>` to end sequences; ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    tied: bool = True,
    seed: int = 0,
    hidden_size: int = 32,
    num_layers: int = 2,
    **overrides: Any,
) -> Path:
    """Save a tiny random model of a family, its tokenizer and its generation config, and return the folder.

    Args:
        folder: Where to; created if missing.
        family: One of `FAMILIES`.
        tied: Whether the head shares the embedding's weights.
        seed: Of the weights; the caller's random state is left alone.
        hidden_size: Width; it has four heads, two of them for keys and values.
        num_layers: Depth.
        **overrides: Further attributes of the family's config, such as `attention_dropout`; `initializer_range`, the standard
            deviation of every initial weight, makes distributions more or less peaked.
    """
    tokenizer = build_tiny_tokenizer()
    config = _CONFIGS[family](
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.5,
            "tie_word_embeddings": tied,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **_SPECIALS.get(family, {}),
            **overrides,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
