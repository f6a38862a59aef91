"""Trained adapters merged into the model that they were trained on: a whole model again."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from grpo_cli.errors import ModelError
from grpo_cli.policy.load import explained, prepared_location, repair_generation_config
from grpo_cli.sharding import keep_deepspeed_quiet

CONFIG_FILE = "adapter_config.json"


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
    settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    name = base or settings["base_model_name_or_path"]
    revision = None if base else settings.get("revision")
    with explained(name):
        location = prepared_location(name, Path.cwd())
        model = AutoModelForCausalLM.from_pretrained(location.name_or_path, revision=revision, dtype="auto")
        merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    repair_generation_config(merged)
    return merged
