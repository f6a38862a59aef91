"""What adapters that were trained before are like, from the files that PEFT writes beside them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.errors import ModelError
from grpo_cli.hub import stay_offline_without_network
from grpo_cli.policy.locate import paths_hint
from grpo_cli.recipe.kinds import bare
from grpo_cli.recipe.schema import LoraSection

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_KEY = "model.lora.adapter_name_or_path"

_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal")
"""Ways to begin that leave the model's own weights alone."""

_ADDITIONS = (
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "exclude_modules", "target_parameters"),
    *("trainable_token_indices", "lora_bias", "alora_invocation_tokens"),
)
"""Settings of PEFT that make other adapters than `model.lora` describes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSettings:
    """What the configuration of adapters says.

    Attributes:
        lora: Their shapes, as a recipe would ask for them.
        base: The model that they were trained on, as it was named then.
        revision: Of that model.
    """

    lora: LoraSection
    base: str | None
    revision: str | None


def adapters_folder(name_or_path: str, folder: Path) -> Path:
    """Find the folder of adapters; those of the hub are fetched.

    Args:
        name_or_path: As `model.lora.adapter_name_or_path` names them: a path (from `folder`, then from the working folder) or a hub id.
        folder: The recipe's folder.

    Raises:
        ModelError: If they are not found.
    """
    for base in (folder, Path.cwd()):
        candidate = (base / Path(name_or_path).expanduser()).resolve()
        if candidate.is_dir():
            return candidate
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") != 1:
        raise ModelError(f"{_KEY}: {name_or_path} does not exist", hint=paths_hint(folder))
    stay_offline_without_network()
    from huggingface_hub import snapshot_download  # noqa: PLC0415  most runs do without

    try:
        return Path(snapshot_download(name_or_path, allow_patterns=["adapter_*", "quantization.json"]))
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{_KEY}: {name_or_path} is no folder and cannot be had from the hub: {reason}",
            hint="name a folder with adapter_config.json, or a hub id",
        ) from error


def read_adapter_settings(folder: Path, *, key: str = _KEY) -> AdapterSettings:
    """Read what adapters are like.

    Args:
        folder: Where they are.
        key: What has named them, for errors.

    Raises:
        ModelError: If there are none, or they are of a kind that is not known here.
    """
    path = folder / CONFIG_FILE
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{key}: {folder} holds no adapters (it has no {CONFIG_FILE})", hint=f"name a folder with {CONFIG_FILE}"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{key}: {path} cannot be read: {error}",
            hint="load the adapters with PeftModel.from_pretrained, and save them again",
        ) from error
    missing = next((name for name in ("r", "lora_alpha", "target_modules") if found.get(name) is None), None)
    if missing is not None and found.get("peft_type") == "LORA":
        raise ModelError(
            f"{key}: {path} does not say {missing}; allowed: what `save_pretrained` of PEFT writes",
            hint="load the adapters with PeftModel.from_pretrained, and save them again",
        )
    unknown = next(_unknown(found), None)
    if unknown is not None:
        raise ModelError(
            f"{key}: {folder} holds adapters of a kind that is not known here: {unknown}",
            hint="merge them into their model with `grpo export --merge`, and name that as the model",
        )
    lora = LoraSection(
        r=found["r"],
        alpha=float(found["lora_alpha"]),
        target_modules=sorted(found["target_modules"]),
        use_rslora=bool(found.get("use_rslora", False)),
        use_dora=bool(found.get("use_dora", False)),
        modules_to_save=sorted(found.get("modules_to_save") or []),
    )
    return AdapterSettings(lora=lora, base=found.get("base_model_name_or_path"), revision=found.get("revision"))


def check_weights(folder: Path) -> None:
    """See that the adapters of `model.lora.adapter_name_or_path` are in a file that cannot run code.

    Raises:
        ModelError: If they are not.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        others = ", ".join(sorted(path.name for path in folder.glob("adapter_model.*"))) or "no weights"
        raise ModelError(
            f"{_KEY}: found {others} in {folder}; allowed: {WEIGHTS_FILE}",
            hint="load the adapters with PeftModel.from_pretrained and save them again: PEFT writes that file now",
        )


def _unknown(found: dict[str, Any]) -> Iterator[str]:
    """Say what `LoraSection` has no words for."""
    if found.get("peft_type") != "LORA":
        yield f"peft_type is {bare(found.get('peft_type'))}"
    if not isinstance(found.get("target_modules"), list):
        yield f"target_modules is {found.get('target_modules')!r} and not a list"
    if found.get("bias", "none") != "none":
        yield f"bias is {found['bias']}"
    if found.get("init_lora_weights") not in _PLAIN_STARTS:
        yield f"init_lora_weights is {found['init_lora_weights']}"
    for name in _ADDITIONS:
        if found.get(name):
            yield f"{name} is {found[name]!r}"
