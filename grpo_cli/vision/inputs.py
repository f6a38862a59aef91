"""What a vision-language model is called with beside the tokens of prompts that have images.

Letters: P prompt tokens, A kinds of positions (1, or 3 for time, height and width).
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def is_vision_language(config: Any) -> bool:
    """Tell whether a configuration is that of a model that reads images and text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES  # noqa: PLC0415  slow

    return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and hasattr(config, "vision_config")


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Give the ids that stand for images, videos or sounds in a prompt: no completion may have one."""
    named = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    rows = config.get_text_config().vocab_size
    return tuple(sorted({token for token in named if isinstance(token, int) and 0 <= token < rows}))


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Put the image tensors of several prompts one after another.

    Their first axis counts images, or patches of them; where the others differ, shorter ones are filled up with zeros, which models
    that cut images into parts are told to ignore by their sizes and masks.
    """
    names = parts[0].keys()
    return {name: torch.cat(list(_filled_up([part[name] for part in parts]))) for name in names}


def _filled_up(tensors: Sequence[Tensor]) -> Iterable[Tensor]:
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    for tensor in tensors:
        missing = [wanted - size for wanted, size in zip(shape, tensor.shape[1:], strict=True)]
        yield pad(tensor, [number for one in reversed(missing) for number in (0, one)]) if any(missing) else tensor


def image_features(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Encode images: the `mm_encoder_outputs` that transformers' vision-language models take instead of pixels.

    Args:
        model: A transformers vision-language model.
        tensors: As `joined` gives them, on any device.
    """
    weight = model.get_input_embeddings().weight
    moved = {name: _moved(tensor, weight) for name, tensor in tensors.items()}
    return {"image": model.model.get_image_features(**moved, return_dict=True)}


def token_types(config: Any, ids: Tensor) -> Tensor:
    """Tell text (0) from places of images (1), as models and processors number them: int64, shaped as `ids`."""
    placeholder: int = config.image_token_id
    return (ids == placeholder).long()


def sees_images_both_ways(model: Any) -> bool:
    """Tell whether the tokens of one image attend to all of each other, later ones included, as those of Gemma 3 do.

    Args:
        model: A transformers vision-language model. One that does is told which tokens are an image's by `token_type_ids`.
    """
    return "token_type_ids" in inspect.signature(model.forward).parameters


def plain_arguments(model: Any, ids: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give what a vision-language model is called with beside tokens, as its own processor would.

    Args:
        model: A transformers vision-language model.
        ids: int64 [N, T].
        tensors: Of all images of the N rows, as `joined` gives them.
    """
    known = inspect.signature(model.forward).parameters
    types = token_types(model.config, ids)
    told = {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in known}
    weight = model.get_input_embeddings().weight
    return {name: _moved(tensor, weight) for name, tensor in tensors.items()} | told


def prompt_positions(model: Any, ids: Sequence[int], tensors: Mapping[str, Tensor]) -> Tensor:
    """Give the rotary positions of a prompt's tokens: int64 [A, P] on the CPU.

    Models of the Qwen2-VL kind place the parts of an image by time, height and width (M-RoPE, Wang et al. 2024, section 2.1); what
    follows goes on behind the largest of these.

    Args:
        model: A transformers vision-language model.
        ids: P prompt tokens.
        tensors: Those of the prompt's images.
    """
    body = model.model
    if not hasattr(body, "get_rope_index"):
        return torch.arange(len(ids))[None]
    row = torch.tensor([ids])
    grids = {name: tensor for name, tensor in tensors.items() if name.endswith("grid_thw")}
    positions, _ = body.get_rope_index(row, mm_token_type_ids=token_types(model.config, row), **grids)
    found: Tensor = positions[:, 0]
    return found


def image_runs(config: Any, ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Give first place and length of each run of image tokens in a prompt."""
    places = (torch.tensor([-1, *ids, -1]) == config.image_token_id).int().diff().nonzero()[:, 0].view(-1, 2)
    return tuple((start, end - start) for start, end in places.tolist())


def _moved(tensor: Tensor, weight: Tensor) -> Tensor:
    """Bring a tensor to a weight's device, and pixels to its precision."""
    dtype = weight.dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device=weight.device, dtype=dtype)
