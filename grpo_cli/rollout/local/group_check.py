"""Whether a model can be sampled from with the group decoder."""

import io
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from grpo_cli.device_memory import is_out_of_memory
from grpo_cli.precision import computing_dtype, is_reduced
from grpo_cli.rollout.local.group_decoder import GroupDecoder, attending_by_groups
from grpo_cli.rollout.local.prompt_images import PromptImages
from grpo_cli.sharding import whole_shape
from grpo_cli.types import Prompt, PromptId
from grpo_cli.vision.inputs import plain_arguments
from grpo_cli.vision.processor import VisionProcessor

_LIMIT = 1e-3
"""Largest difference between two ways to the same logits in float32 or better, as a share of the largest logit."""
_REDUCED_LIMIT = 0.05
"""The same in types of less precision."""

_LENGTH_OF_A_REASON = 160
"""Characters of an error's message that a notice repeats."""

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def window_of(model: Any) -> int | None:
    """Give the tokens that some layer of a model sees at most, its newest included; None: every layer sees all.

    A few tokens could not show this. Sequences that fit into the window are not touched by it.
    """
    config = model.config.get_text_config()
    if set(getattr(config, "layer_types", None) or ()) == {"full_attention"}:
        return None  # a window that no layer uses
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((window for window in windows if window), default=None)


def obstacle(model: Any, vision: VisionProcessor | None = None, *, flash: bool = True) -> str | None:
    """Compare the group decoder with plain forwards over whole sequences, on a few tokens and, if it is to see images, on one.

    Args:
        model: In evaluation mode, gradients off.
        vision: Prepares images; None: there will be none.
        flash: See `GroupCache`.

    Returns:
        Why the model cannot be sampled from with the group decoder; None: it can.
    """
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if layers - _ATTENTION_LAYERS:
        return f"it has layers of {', '.join(sorted(layers - _ATTENTION_LAYERS))}"
    try:
        expected, found = _logits(model, vision, flash=flash)
    except (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return _in_words(error)
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    if difference <= (_REDUCED_LIMIT if is_reduced(computing_dtype(model)) else _LIMIT):
        return None
    return f"its logits would differ by {difference:.2g} of the largest"


def _in_words(error: Exception) -> str:
    """Say for a person why a model does not work with the group decoder."""
    message = shorten(str(error), _LENGTH_OF_A_REASON, placeholder=" ...") or type(error).__name__
    match error:
        case NotImplementedError() | ValueError():  # what the group decoder itself refuses is a sentence already
            return message
        case TypeError():
            return "its forward takes arguments of its own"
        case _:
            return f"its forward fails ({message})"


def _logits(model: Any, vision: VisionProcessor | None, *, flash: bool) -> tuple[Tensor, Tensor]:
    """Logits after the same tokens in two ways, float32 [12, V] each: plain forwards, and rows that come and go."""
    vocabulary = whole_shape(model.get_input_embeddings().weight)[0]
    # The rows' groups, and the tokens they sample.
    groups = (0, 0, 1, 0)
    sampled = ((11,), (13, 17, 19), (23, 29, 31), (37,))
    questions = [_prompt([7 * place % vocabulary for place in range(1, length)]) for length in (6, 4)]
    images = None
    if vision is not None:
        question, window = _prompt_with_image(vision), window_of(model)
        if window is None or len(question.ids) + len(sampled[2]) <= window:  # others are never fed by groups
            questions[1] = question
        images = PromptImages(model=model, prompts=questions, vision=vision)
    prompts = [question.ids for question in questions]
    rows = [
        [*prompts[group], *(token % vocabulary for token in tokens)]
        for group, tokens in zip(groups, sampled, strict=True)
    ]
    device = model.get_input_embeddings().weight.device
    plain = []
    for group, row in zip(groups, rows, strict=True):
        ids = torch.tensor([row], device=device)
        tensors = vision.tensors(questions[group].images) if vision is not None and questions[group].images else {}
        arguments = {} if vision is None else plain_arguments(model, ids, tensors)
        plain.append(model(input_ids=ids, use_cache=False, **arguments).logits[0])
    fed = [len(prompts[group]) for group in groups]
    expected: list[Tensor] = []
    found: list[Tensor] = []

    def compare(held: Sequence[int], logits: Tensor) -> None:
        expected.extend(plain[row][fed[row] - 1] for row in held)
        found.extend(logits)

    def step(held: Sequence[int]) -> None:
        logits = decoder.step([rows[row][fed[row]] for row in held])
        for row in held:
            fed[row] += 1
        compare(held, logits)

    with attending_by_groups(model):
        decoder = GroupDecoder(model, prompts, slots=3, max_tokens=3, images=images, flash=flash)
        compare((0, 1, 2), decoder.join((0, 0, 1)))
        step((0, 1, 2))
        decoder.keep((2, 1))
        step((2, 1))
        compare((3,), decoder.join((0,)))
        step((2, 1, 3))
    return torch.stack(expected).float(), torch.stack(found).float()


def _prompt(ids: Sequence[int], images: tuple[bytes, ...] = ()) -> Prompt:
    return Prompt(uid=PromptId("check"), ids=tuple(ids), text="", messages=None, row={}, images=images)


def _prompt_with_image(vision: VisionProcessor) -> Prompt:
    """Make a prompt with a small image of no uniform colour, which is no square."""
    gradient = Image.radial_gradient("L").resize((96, 64)).convert("RGB")
    encoded = io.BytesIO()
    gradient.save(encoded, format="PNG")
    images = (encoded.getvalue(),)
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
    return _prompt(vision.encode(vision.render([turn], add_generation_prompt=True), images), images)
