"""Load what prepares images for a vision-language model."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoProcessor
from transformers.utils import cached_file

from grpo_cli.errors import ModelError
from grpo_cli.policy.load import explained, load_config, prepared_location, read_chat_template
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.recipe.suggest import did_you_mean
from grpo_cli.vision.inputs import is_vision_language
from grpo_cli.vision.processor import VisionProcessor

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_OF_LOADING = ("backend", "use_fast")
"""Options of transformers' choice among image processors."""

_TEMPLATE_FILE = "chat_template.jinja"
_OLD_TEMPLATE_FILE = "chat_template.json"
"""What transformers wrote until 4.45: an object with the template under `chat_template`."""


def load_vision(section: ModelSection, *, folder: Path) -> VisionProcessor | None:
    """Load what prepares images for the recipe's model; None: it reads text only.

    Raises:
        ModelError: If the processor is not found, needs a package that is not installed, does not know an option of
            `model.processor_kwargs`, or has a tokenizer or a chat template that is not for images.
    """
    if not is_vision_language(load_config(section, folder)):
        return None
    if section.tokenizer_name_or_path not in {None, section.name_or_path}:
        raise ModelError(
            f"model.tokenizer_name_or_path: found {section.tokenizer_name_or_path}; where a dataset has images, the tokenizer is that of "
            "the model's processor",
            hint="leave it out, or save the processor with this tokenizer in the model's folder",
        )
    location = prepared_location(section.name_or_path, folder)
    with explained(section.name_or_path):
        processor = AutoProcessor.from_pretrained(
            location.name_or_path,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
            **section.processor_kwargs,
        )
    _check_options(processor, section.processor_kwargs)
    if section.chat_template_path is not None:
        processor.chat_template = read_chat_template(section.chat_template_path, folder)
    elif processor.chat_template is None:
        processor.chat_template = processor.tokenizer.chat_template
    vision = VisionProcessor(processor)
    _check_template(vision, section)
    return vision


def processor_files(section: ModelSection, *, folder: Path, vision: VisionProcessor | None) -> dict[str, bytes]:
    """Give the files of a vision-language model's processor, which a model that was trained needs as well; none for others.

    But for the chat template they are taken as they are: the packages that a processor needs may be missing where nothing but text is
    trained on.

    Args:
        section: The recipe's `model:`.
        folder: The recipe's folder.
        vision: What was trained with; None: text alone was.
    """
    if not is_vision_language(load_config(section, folder)):
        return {}
    location = prepared_location(section.name_or_path, folder)

    def source(name: str) -> bytes | None:
        path = cached_file(
            location.name_or_path, name, revision=section.revision, _raise_exceptions_for_missing_entries=False
        )
        return None if path is None else Path(path).read_bytes()

    files = {name: content for name in _PROCESSOR_FILES if (content := source(name)) is not None}
    if section.chat_template_path is not None:
        template = read_chat_template(section.chat_template_path, folder).encode()
    elif vision is not None:
        template = (vision.chat_template or "").encode()
    else:
        old = source(_OLD_TEMPLATE_FILE)
        template = source(_TEMPLATE_FILE) or (json.loads(old)["chat_template"].encode() if old else b"")
    return files | ({_TEMPLATE_FILE: template} if template else {})


def _check_options(processor: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that neither a processor nor what it has for images knows, which transformers ignores.

    Raises:
        ModelError: Naming the first.
    """
    images = processor.image_processor
    known = {
        *_OF_LOADING,
        *inspect.signature(type(processor)).parameters,
        *inspect.signature(type(images)).parameters,
        *inspect.get_annotations(getattr(type(images), "valid_kwargs", dict)),
        *processor.to_dict(),
        *images.to_dict(),
    } - {"kwargs"}
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise ModelError(
            f"model.processor_kwargs: {type(processor).__name__} and {type(images).__name__} have no option {unknown}",
            hint=did_you_mean(unknown, sorted(known)),
        )


def _check_template(vision: VisionProcessor, section: ModelSection) -> None:
    """Refuse a template for text, which writes the parts of a turn as the objects that they are.

    Raises:
        ModelError: If it is one.
    """
    if vision.chat_template is None:
        return
    text = {"type": "text", "text": "text"}
    try:
        rendered = [
            vision.render([{"role": "user", "content": parts}]) for parts in ([text], [{"type": "image"}, text])
        ]
    except Exception:  # noqa: BLE001  a template is a program; a prompt may suit it better, and if none does, the error names its row
        return
    if any("'type'" in one or '"type"' in one for one in rendered):
        named = section.chat_template_path or f"that of {section.name_or_path}"
        raise ModelError(
            f"model.chat_template_path: {named} is a chat template for text: it writes the parts of a turn with images as they are",
            hint="use the template that comes with the model, or one that goes through the parts of `message.content`",
        )
