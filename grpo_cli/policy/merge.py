"""Trained adapters merged into the model that they were trained on: a whole model again."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_cli.errors import ModelError
from grpo_cli.policy.adapter_settings import CONFIG_FILE, read_adapter_settings
from grpo_cli.policy.adapter_weights import NAME, MergedWeights
from grpo_cli.policy.load import (
    explained,
    load_config,
    load_model,
    model_class,
    prepared_location,
    repair_generation_config,
)
from grpo_cli.policy.quantization import (
    QUANTIZATION_FILE,
    DequantizedWeights,
    with_quantization,
)
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.sharding import keep_deepspeed_quiet


def merged_model(folder: Path, *, base: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load adapters and the model below them, and merge them into it, in the precision that its checkpoint has.

    Args:
        folder: Of the adapters, as a run with `model.lora` writes it.
        base: The model below, as `model.name_or_path` names it; None: the one that they were trained on, where it was then.
        trust_remote_code: Whether Python code that comes with that model may run.

    Returns:
        A transformers causal language model without adapters.

    Raises:
        ModelError: If there are no adapters, or the model below is not found or another one.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(
            f"{folder} holds no adapters, so there is nothing to merge", hint="leave --merge out to copy the model"
        )
    found = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    section = ModelSection(
        name_or_path=base or found["base_model_name_or_path"],
        revision=None if base else found.get("revision"),
        dtype="auto",
        trust_remote_code=trust_remote_code,
    )
    keep_deepspeed_quiet()
    config, location = load_config(section, Path.cwd()), prepared_location(section.name_or_path, Path.cwd())
    with explained(section.name_or_path):
        model = model_class(config).from_pretrained(
            location.name_or_path, revision=section.revision, dtype="auto", trust_remote_code=trust_remote_code
        )
        with_them = _with_rounded_weights if (folder / QUANTIZATION_FILE).is_file() else _with_weights
        merged = with_them(model, folder, section)
    repair_generation_config(merged)
    return merged


def _with_weights(model: Any, folder: Path, section: ModelSection) -> Any:
    """Merge adapters into a model, of whatever kind they are that PEFT knows."""
    from peft import PeftModel  # noqa: PLC0415  it takes a second to import

    adapted = PeftModel.from_pretrained(model, str(folder))
    loaded = adapted.load_adapter(str(folder), NAME)  # again, to be told what did not fit
    _check_names(folder, section, missing=loaded.missing_keys, unexpected=loaded.unexpected_keys)
    return adapted.merge_and_unload()


def _with_rounded_weights(model: Any, folder: Path, section: ModelSection) -> Any:
    """Merge adapters into what they were trained on, quantized weights as they were rounded, and give a model these as its own."""
    lora = read_adapter_settings(folder).lora
    trained = load_model(with_quantization(replace(section, lora=lora), folder), folder=Path.cwd(), adapters=folder)
    named = DequantizedWeights(trained, [(key, one.detach()) for key, one in trained.named_parameters()])
    merged = dict(MergedWeights(trained, named))
    loaded = model.load_state_dict(merged, strict=False)
    # What is not a parameter, or has two names, is no weight of its own.
    own = {name for name, _ in model.named_parameters()}
    _check_names(folder, section, missing=own.intersection(loaded.missing_keys), unexpected=loaded.unexpected_keys)
    return model


def _check_names(folder: Path, section: ModelSection, *, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Refuse a merge in which a weight found no place, or a place no weight."""
    for name in (*missing, *unexpected):
        raise ModelError(
            f"{folder} holds adapters of another model than {section.name_or_path}: {name} does not fit",
            hint="--base names the model that they were trained on",
        )
