"""Tiny random vision-language models with their processors, saved as ordinary folders, for every test that needs a real one.

Each has what its family has: how images become patches or tiles, how many tokens stand for one, where its positions go (M-RoPE), which
layers slide, what is fed to deeper layers. Image tokens are few, and weights are large enough that what is seen changes what is said.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_models import build_tiny_tokenizer
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ImageProcessor,
    Gemma3Processor,
    GenerationConfig,
    GotOcr2ImageProcessor,
    Idefics3Config,
    Idefics3ImageProcessor,
    Idefics3Processor,
    InternVLConfig,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

SLIDING_WINDOW = 8
"""Of Gemma 3's first layer: shorter than a prompt with one image."""

_WIDTH = 64
"""With heads of 32, which vLLM has kernels for on CPUs."""
_SIDE = 16
"""Pixels of a square that vision towers of a fixed size take."""
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))

Ids = Mapping[str, int]
"""Id of each special token, by its text."""


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What the families differ in.

    Attributes:
        image: What stands in a rendered prompt for one image.
        start: What a turn begins with; `ROLE` is its role.
        end: The token that ends a turn, and what a model says last.
        named: Special tokens that the processor asks the tokenizer for by a name.
        others: Further special tokens.
        config: The model's configuration.
        processor: What prepares text and images for it.
    """

    image: str
    start: str
    end: str
    named: Mapping[str, str]
    others: tuple[str, ...] = ()
    config: Callable[[Ids, Mapping[str, Any]], PreTrainedConfig]
    processor: Callable[[Any, str], Any]


def _text(**more: Any) -> dict[str, Any]:
    """The language model's part of a configuration."""
    return {
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "bos_token_id": None,
        **more,
    }


def _tower(**more: Any) -> dict[str, Any]:
    """The vision tower's part of a configuration, for those that take squares."""
    return {
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": _SIDE,
        "patch_size": 4,
        "initializer_range": 0.2,
        **more,
    }


def _qwen_tower(**more: Any) -> dict[str, Any]:
    """The vision tower's part of a configuration, for those of the Qwen families."""
    return {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.2,
        **more,
    }


def _qwen_tokens(ids: Ids) -> dict[str, Any]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _rope(*section: int) -> dict[str, Any]:
    """Rotary dimensions of time, height and width: half of a head's thirty-two."""
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(section)}


def _gemma3(ids: Ids, text: Mapping[str, Any]) -> PreTrainedConfig:
    sliding = {"sliding_window": SLIDING_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    return Gemma3Config(
        text_config=_text(query_pre_attn_scalar=32, **sliding, **text),
        vision_config=_tower(vision_use_head=False),
        mm_tokens_per_image=4,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
    )


def _gemma3_processor(tokenizer: Any, template: str) -> Any:
    images = Gemma3ImageProcessor(size={"height": _SIDE, "width": _SIDE})
    return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


_GRID = [[_SIDE, 2 * _SIDE], [2 * _SIDE, _SIDE], [2 * _SIDE, 2 * _SIDE]]


def _llava_next(ids: Ids, text: Mapping[str, Any]) -> PreTrainedConfig:
    return LlavaNextConfig(
        text_config=_text(model_type="mistral", sliding_window=None, **text),
        vision_config=_tower(model_type="clip_vision_model", patch_size=8, projection_dim=_WIDTH),
        image_token_index=ids["<image>"],
        image_grid_pinpoints=_GRID,
        image_seq_length=4,
    )


def _llava_next_processor(tokenizer: Any, template: str) -> Any:
    square = {"height": _SIDE, "width": _SIDE}
    images = LlavaNextImageProcessor(size={"shortest_edge": _SIDE}, crop_size=square, image_grid_pinpoints=_GRID)
    return LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def _qwen2_vl(ids: Ids, text: Mapping[str, Any]) -> PreTrainedConfig:
    return Qwen2VLConfig(
        text_config=_text(rope_parameters=_rope(4, 6, 6), **text),
        vision_config=_qwen_tower(embed_dim=_WIDTH, hidden_size=_WIDTH, mlp_ratio=2),
        **_qwen_tokens(ids),
    )


def _qwen2_5_vl(ids: Ids, text: Mapping[str, Any]) -> PreTrainedConfig:
    windows = {"window_size": 16, "fullatt_block_indexes": [1]}  # of two by two tokens, in the first block
    return Qwen2_5_VLConfig(
        text_config=_text(rope_parameters=_rope(4, 6, 6), **text),
        vision_config=_qwen_tower(hidden_size=_WIDTH, out_hidden_size=_WIDTH, intermediate_size=2 * _WIDTH, **windows),
        **_qwen_tokens(ids),
    )


def _qwen3_vl(ids: Ids, text: Mapping[str, Any]) -> PreTrainedConfig:
    deepstack = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    return Qwen3VLConfig(
        text_config=_text(rope_parameters={**_rope(8, 4, 4), "mrope_interleaved": True}, **text),
        vision_config=_qwen_tower(
            hidden_size=_WIDTH, out_hidden_size=_WIDTH, intermediate_size=2 * _WIDTH, **deepstack
        ),
        **_qwen_tokens(ids),
    )


def _qwen_processor(kind: Any, videos: Any) -> Callable[[Any, str], Any]:
    def build(tokenizer: Any, template: str) -> Any:
        pixels = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
        cut = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": pixels}
        return kind(Qwen2VLImageProcessor(**cut), tokenizer, videos(**cut), chat_template=template)

    return build


def _tiled(kind: Any) -> Callable[[Ids, Mapping[str, Any]], PreTrainedConfig]:
    def build(ids: Ids, text: Mapping[str, Any]) -> PreTrainedConfig:
        config: PreTrainedConfig = kind(
            text_config=_text(model_type="llama", **text),
            vision_config=_tower(),
            image_token_id=ids["<image>"],
            pad_token_id=ids["<|pad|>"],
            scale_factor=2,
        )
        return config

    return build


_TILING = {"size": {"longest_edge": 2 * _SIDE}, "max_image_size": {"longest_edge": _SIDE}}


def _smolvlm_processor(tokenizer: Any, template: str) -> Any:
    images, videos = SmolVLMImageProcessor(**_TILING), SmolVLMVideoProcessor(**_TILING)
    return SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4, chat_template=template)


def _idefics3_processor(tokenizer: Any, template: str) -> Any:
    return Idefics3Processor(Idefics3ImageProcessor(**_TILING), tokenizer, image_seq_len=4, chat_template=template)


def _internvl(ids: Ids, text: Mapping[str, Any]) -> PreTrainedConfig:
    return InternVLConfig(
        text_config=_text(model_type="qwen2", **text),
        vision_config=_tower(),
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
    )


def _internvl_processor(tokenizer: Any, template: str) -> Any:
    square = {"height": _SIDE, "width": _SIDE}
    images = GotOcr2ImageProcessor(size=square, crop_to_patches=True, min_patches=1, max_patches=3)
    videos = InternVLVideoProcessor(size=square)
    return InternVLProcessor(images, tokenizer, videos, image_seq_length=4, chat_template=template)


_CHATML = "<|im_start|>ROLE\n"
_QWEN: dict[str, Any] = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "start": _CHATML,
    "end": "<|im_end|>",
    "named": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "others": ("<|vision_start|>", "<|vision_end|>"),
}
_IDEFICS: dict[str, Any] = {
    "image": "<image>",
    "start": "<|im_start|>ROLE: ",
    "end": "<end_of_utterance>",
    "named": {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"},
    "others": ("<end_of_utterance>", "<global-img>", *_TILES),
}
_FAMILIES: dict[str, _Family] = {
    "gemma3": _Family(
        image="<start_of_image>",
        start="<start_of_turn>ROLE\n",
        end="<end_of_turn>",
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        # Its tokenizer has lines as tokens, and vLLM counts on that.
        others=("<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "\n\n\n", "\n\n\n\n"),
        config=_gemma3,
        processor=_gemma3_processor,
    ),
    "llava_next": _Family(
        image="<image>\n",
        start="[ROLE] ",
        end="</s>",
        named={"image_token": "<image>"},
        others=("</s>",),
        config=_llava_next,
        processor=_llava_next_processor,
    ),
    "qwen2_vl": _Family(**_QWEN, config=_qwen2_vl, processor=_qwen_processor(Qwen2VLProcessor, Qwen2VLVideoProcessor)),
    "qwen2_5_vl": _Family(
        **_QWEN, config=_qwen2_5_vl, processor=_qwen_processor(Qwen2_5_VLProcessor, Qwen2VLVideoProcessor)
    ),
    "qwen3_vl": _Family(**_QWEN, config=_qwen3_vl, processor=_qwen_processor(Qwen3VLProcessor, Qwen3VLVideoProcessor)),
    "smolvlm": _Family(**_IDEFICS, config=_tiled(SmolVLMConfig), processor=_smolvlm_processor),
    "idefics3": _Family(**_IDEFICS, config=_tiled(Idefics3Config), processor=_idefics3_processor),
    "internvl": _Family(
        image="<IMG_CONTEXT>\n",
        start=_CHATML,
        end="<|im_end|>",
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        config=_internvl,
        processor=_internvl_processor,
    ),
}
VISION_FAMILIES = tuple(_FAMILIES)


def build_tiny_vision_model(
    folder: Path, family: str, *, seed: int = 0, tower: Mapping[str, Any] | None = None, **text: Any
) -> Path:
    """Save a tiny random model of a family, its processor and its generation config, and return the folder.

    Args:
        folder: Where to; created if missing.
        family: One of `VISION_FAMILIES`.
        seed: Of the weights; the caller's random state is left alone.
        tower: Attributes of the configuration's `vision_config` to change.
        **text: Attributes of the configuration's `text_config` to change.
    """
    kind = _FAMILIES[family]
    template = _template(kind)
    tokenizer = _tokenizer(kind, template)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = kind.config(tokenizer.get_vocab(), {"vocab_size": len(tokenizer), **ends, **text})
    for name, value in (tower or {}).items():
        setattr(config.vision_config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        _enliven(model)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    kind.processor(tokenizer, template).save_pretrained(folder)
    return folder


def _tokenizer(kind: _Family, template: str) -> Any:
    """One token per byte, then the special tokens of the text models, then the family's."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tiny_tokenizer().backend_tokenizer,
        pad_token="<|pad|>",
        extra_special_tokens=dict(kind.named),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.add_special_tokens({"eos_token": kind.end, "extra_special_tokens": list(kind.others)}, False)
    return tokenizer


def _template(kind: _Family) -> str:
    """Turns whose content is a text or a list of parts, as all templates of the families read them."""
    start = kind.start.replace("ROLE", "{{ message['role'] }}")
    reply = kind.start.replace("ROLE", "assistant")
    return (
        "{% for message in messages %}" + start + "{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + kind.image + "{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}" + kind.end + "\n{% endfor %}"
        "{% if add_generation_prompt %}" + reply + "{% endif %}"
    )


def _enliven(model: nn.Module) -> None:
    """Give what initialisation leaves at zero, Gemma 3's projector above all, values that let images through."""
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.3)
