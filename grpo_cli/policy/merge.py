"""Trained adapters merged into the model that they were trained on: a whole model again."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_cli.errors import ModelError
from grpo_cli.policy.adapter_settings import CONFIG_FILE, read_adapter_settings
from grpo_cli.policy.adapter_sizes import check_layers
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
from grpo_cli.policy.weights_below import other_base
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.sharding import keep_deepspeed_quiet


def merged_model(
    folder: Path,
    *,
    base: str | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Any:
    """Load adapters and the model below them, and merge them into it, in the precision that its checkpoint has.

    Args:
        folder: Of the adapters, as a run with `model.lora` writes it.
        base: The model below, as `model.name_or_path` names it; None: the one that they were trained on, where it was then.
        trust_remote_code: Whether Python code that comes with that model may run.
        say: Told if nothing tells whether it is the model that they were trained on.

    Returns:
        A transformers causal language model without adapters.

    Raises:
        ModelError: If there are no adapters, or the model below is not found or another one.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(
            f"{folder} holds no adapters, so there is nothing to merge", hint="leave --merge out to copy the model"
        )
    section = replace(_below(folder, base), trust_remote_code=trust_remote_code)
    keep_deepspeed_quiet()
    with _explained(folder, base):
        location = prepared_location(section.name_or_path, Path.cwd())
        key = "--merge" if base is None else "--base"
        notice = other_base(folder, section, Path.cwd(), key=key)
        with explained(section.name_or_path):
            model = model_class(load_config(section, Path.cwd())).from_pretrained(
                location.name_or_path, revision=section.revision, dtype="auto", trust_remote_code=trust_remote_code
            )
            check_layers(model, folder, key=key, name=section.name_or_path, all_of_them=False)
            if notice is not None:
                say(f"{folder}: {notice}")
            with_them = _with_rounded_weights if (folder / QUANTIZATION_FILE).is_file() else _with_weights
            merged = with_them(model, folder, section)
    repair_generation_config(merged)
    return merged


def _below(folder: Path, base: str | None) -> ModelSection:
    """Describe the model below adapters."""
    found = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    name = base or found.get("base_model_name_or_path")
    if name is None:
        raise ModelError(
            f"{folder} holds adapters, and does not say of which model", hint="name that model: --base MODEL"
        )
    return ModelSection(name_or_path=name, revision=None if base else found.get("revision"), dtype="auto")


@contextmanager
def _explained(folder: Path, base: str | None) -> Iterator[None]:
    """Say of what goes wrong with the model below that it is not a recipe which has named it."""
    try:
        yield
    except ModelError as error:
        key, _, told = error.message.partition(": ")
        if key != "model.name_or_path":
            raise
        if base is not None:
            raise ModelError(f"--base: {told}", hint=error.hint) from error
        raise ModelError(
            f"the model that the adapters in {folder} were trained on: {told}",
            hint="if it is somewhere else now, name it: --base MODEL",
        ) from error


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
