"""Trained adapters merged into the model that they were trained on: a whole model again."""

import json
from pathlib import Path
from typing import Any

from grpo_cli.errors import ModelError
from grpo_cli.policy.adapter_settings import CONFIG_FILE, read_adapter_settings
from grpo_cli.policy.adapter_weights import MergedWeights
from grpo_cli.policy.load import explained, load_model, model_class, prepared_location, repair_generation_config
from grpo_cli.policy.quantization import (
    QUANTIZATION_FILE,
    DequantizedWeights,
    with_quantization,
)
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.sharding import keep_deepspeed_quiet


def merged_model(folder: Path, *, base: str | None = None) -> Any:
    """Load adapters and the model below them, and merge them into it, in the precision that its checkpoint has.

    Args:
        folder: Of the adapters, as a run with `model.lora` writes it.
        base: The model below, as `model.name_or_path` names it; None: the one that they were trained on, where it was then.

    Returns:
        A transformers causal language model without adapters.

    Raises:
        ModelError: If there are no adapters, or the model below is not found or another one.
    """
    keep_deepspeed_quiet()
    from peft import PeftModel  # noqa: PLC0415  it takes a second to import

    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(
            f"{folder} holds no adapters, so there is nothing to merge", hint="leave --merge out to copy the model"
        )
    found = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    name = base or found["base_model_name_or_path"]
    revision = None if base else found.get("revision")
    with explained(name):
        location = prepared_location(name, Path.cwd())
        model = model_class(location, revision=revision).from_pretrained(
            location.name_or_path, revision=revision, dtype="auto"
        )
        if (folder / QUANTIZATION_FILE).is_file():
            merged = _with_rounded_weights(model, folder, name, revision)
        else:
            merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    repair_generation_config(merged)
    return merged


def _with_rounded_weights(model: Any, folder: Path, name: str, revision: str | None) -> Any:
    """Merge adapters into what they were trained on, quantized weights as they were rounded, and give a model these as its own."""
    section = ModelSection(name_or_path=name, revision=revision, lora=read_adapter_settings(folder).lora)
    trained = load_model(with_quantization(section, folder), folder=Path.cwd(), adapters=folder)
    named = DequantizedWeights(trained, [(key, one.detach()) for key, one in trained.named_parameters()])
    model.load_state_dict(dict(MergedWeights(trained, named)), strict=False)
    return model
