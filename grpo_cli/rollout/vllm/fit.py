"""Whether a server is the one that a run needs: with the same model, in the same precision, for as much as it will be asked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import ModelError
from grpo_cli.rollout.vllm.prompt_images import more_images_hint

if TYPE_CHECKING:
    from grpo_cli.rollout.vllm.client import ServerStatus

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a run needs of its servers.

    Attributes:
        model: What it calls its model.
        sizes: Of the model; see `model_sizes`.
        dtype: What it counts on vLLM to compute in, such as `float32`; None: anything.
        device: Type of the device that trains, such as `cuda`; None: anything.
        longest: Longest prompt and completion together in tokens; None: not known.
        num_generations: Most completions of one prompt.
        image_options: Of what prepares the images of its prompts; None: they have none.
        most_images: Most images of one prompt, of those that are known before training.
    """

    model: str = "another model"
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: str | None = None
    device: str | None = None
    longest: int | None = None
    num_generations: int = 1
    image_options: Mapping[str, Any] | None = None
    most_images: int = 0


def model_sizes(config: Any) -> dict[str, int]:
    """Give the numbers by which two models can be told apart without a look at their weights.

    Args:
        config: A transformers configuration.
    """
    text = config.get_text_config()
    found = {name: getattr(text, name, None) for name in _SIZES}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def check_fit(server: str, status: "ServerStatus", needs: Needs) -> None:
    """Compare what a run needs with what a server is.

    Args:
        server: Names it.
        status: What it says of itself.
        needs: Of the run.

    Raises:
        ModelError: If it is something else.
    """
    for name, wanted in needs.sizes.items():
        found = status.sizes.get(name, wanted)
        if found != wanted:
            raise ModelError(
                f"{server}: it serves {status.model}, whose {name} is {found}; that of {needs.model}, which is trained here, is {wanted}",
                hint="start it with the model of this recipe: `grpo vllm-serve RECIPE`",
            )
    if needs.device not in (None, status.device):
        raise ModelError(
            f"{server}: it computes on {status.device}, but this run trains on {needs.device}: no way of sending weights leads from one "
            "to the other",
            hint="run both on the same kind of device",
        )
    if needs.dtype not in (None, status.dtype):
        raise ModelError(
            f"{server}: it computes in {status.dtype}, but this run counts on {needs.dtype} (vllm.dtype)",
            hint=f"start it with --dtype {needs.dtype}, or set vllm.dtype to {status.dtype}",
        )
    _check_sight(server, status, needs)
    if needs.longest is not None and status.max_model_len < needs.longest:
        raise ModelError(
            f"{server}: its longest sequence is {status.max_model_len} tokens, but a prompt and its completion can have "
            f"{needs.longest} here",
            hint=f"start it with --max-model-length {needs.longest}, or lower dataset.max_prompt_length or "
            "generation.max_completion_length",
        )
    if status.max_num_generations < needs.num_generations:
        raise ModelError(
            f"{server}: it samples up to {status.max_num_generations} completions of a prompt, but this run asks for "
            f"{needs.num_generations}",
            hint=f"start it with --max-num-generations {needs.num_generations}, or lower grpo.num_generations or eval.num_generations",
        )


def _check_sight(server: str, status: "ServerStatus", needs: Needs) -> None:
    """Compare what is made of images; some differences leave the tokens of a prompt as they are."""
    if needs.image_options is None:
        return
    if status.max_images == 0:
        raise ModelError(
            f"{server}: it takes no images, but prompts of this run have some",
            hint=f"start it with a model that sees, as {needs.model} does: `grpo vllm-serve RECIPE`",
        )
    if status.max_images < needs.most_images:
        raise ModelError(
            f"{server}: it takes {status.max_images} image(s) of a prompt, but prompts of this run have up to {needs.most_images}",
            hint=more_images_hint(needs.most_images),
        )
    if status.image_options != needs.image_options:
        raise ModelError(
            f"{server}: it prepares images with the options {json.dumps(status.image_options)}, but this run with {json.dumps(needs.image_options)} "
            "(model.processor_kwargs)",
            hint="start it with this recipe: `grpo vllm-serve RECIPE`",
        )
