"""Load what prepares images for a vision-language model."""

from pathlib import Path

from transformers import AutoProcessor
from transformers.utils import cached_file

from grpo_cli.policy.load import explained, load_config, prepared_location, read_chat_template
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.vision.inputs import is_vision_language
from grpo_cli.vision.processor import VisionProcessor

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def load_vision(section: ModelSection, *, folder: Path) -> VisionProcessor | None:
    """Load what prepares images for the recipe's model; None: it reads text only.

    Raises:
        ModelError: If the processor is not found, or needs a package that is not installed.
    """
    if not is_vision_language(load_config(section, folder)):
        return None
    location = prepared_location(section.name_or_path, folder)
    with explained(section.name_or_path):
        processor = AutoProcessor.from_pretrained(
            location.name_or_path,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
            **section.processor_kwargs,
        )
    if section.chat_template_path is not None:
        processor.chat_template = read_chat_template(section.chat_template_path, folder)
    elif processor.chat_template is None:
        processor.chat_template = processor.tokenizer.chat_template
    return VisionProcessor(processor)


def processor_files(section: ModelSection, *, folder: Path) -> dict[str, bytes]:
    """Read the files of a vision-language model's processor, which a model that was trained needs as well; none for others.

    They are taken as they are: the packages that a processor needs may be missing where nothing but text is trained on.
    """
    if not is_vision_language(load_config(section, folder)):
        return {}
    location = prepared_location(section.name_or_path, folder)
    found = {
        name: cached_file(
            location.name_or_path, name, revision=section.revision, _raise_exceptions_for_missing_entries=False
        )
        for name in _PROCESSOR_FILES
    }
    return {name: Path(path).read_bytes() for name, path in found.items() if path is not None}
