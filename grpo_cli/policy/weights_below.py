"""Which weights are below adapters: noted beside them, and compared where they are put on a model again."""

import hashlib
import json
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from grpo_cli.errors import ModelError
from grpo_cli.policy.adapter_settings import CONFIG_FILE
from grpo_cli.policy.load import prepared_location
from grpo_cli.policy.locate import ModelLocation
from grpo_cli.recipe.schema import ModelSection

BASE_FILE = "adapter_base.json"
"""Says beside adapters what the weights below are; PEFT notes no more than their name."""

_SAMPLE = 16
"""Numbers of each tensor that are looked at: thousands of a model, and little to read of one of any size."""


def base_file(section: ModelSection, folder: Path) -> dict[str, bytes]:
    """Make the file that tells the weights below adapters, by its name; none if they cannot be looked at."""
    found = weights_digest(section, folder)
    return {} if found is None else {BASE_FILE: json.dumps({"weights": found}).encode()}


_BUFFERS = (
    ".attn.bias",
    ".masked_bias",
    ".inv_freq",
    ".position_ids",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
)
"""Ends of the names of what older versions of transformers saved beside weights, and newer ones leave out: it is computed."""


def weights_digest(section: ModelSection, folder: Path) -> str | None:
    """Tell a model's weights from others by some numbers of each tensor.

    The same weights have the same digest in another place, in other files, under other names, and rounded to bfloat16.

    Args:
        section: The recipe's `model:`.
        folder: The recipe's folder, which relative paths start from.

    Returns:
        None if its weights are not on this machine, or not in safetensors that can be read.
    """
    if section.random_weights_seed is not None:
        return f"random_weights_seed: {section.random_weights_seed}"
    files = _weight_files(prepared_location(section.name_or_path, folder), section.revision)
    # A set: a head that is the embedding may have been saved with it, or not.
    try:
        samples = {sample for file in files for sample in _samples(file)}
    except SafetensorError:  # loading the model tells what is wrong
        return None
    return hashlib.sha256(b"".join(sorted(samples))).hexdigest() if samples else None


def _weight_files(location: ModelLocation, revision: str | None) -> list[Path]:
    """Find the files that `from_pretrained` would read, as far as they are on this machine."""
    folder = Path(location.name_or_path)
    if not folder.is_dir():
        config = try_to_load_from_cache(location.name_or_path, "config.json", revision=revision)
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    files = [folder / name for name in sorted(named)]
    return files if all(file.is_file() for file in files) else []


def _samples(path: Path) -> list[bytes]:
    """Give the shape and the first numbers of each tensor of a file."""
    found = []
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no mapping
            if name.endswith(_BUFFERS):
                continue
            whole = file.get_slice(name)
            shape = whole.get_shape()
            first = whole[(*(slice(0, 1) for _ in shape[:-1]), slice(0, _SAMPLE))] if shape else file.get_tensor(name)
            numbers = first.flatten().to(torch.bfloat16).view(torch.int16)
            found.append(f"{shape}".encode() + numbers.numpy().tobytes())
    return found


def other_base(adapters: Path, section: ModelSection, folder: Path, *, key: str) -> str | None:
    """Tell whether a model is another one than adapters were trained on.

    Args:
        adapters: Their folder.
        section: The model that they are to be put on.
        folder: What its relative path starts from.
        key: What names that model.

    Returns:
        A notice if it has another name, and nothing tells whether it is the same; None if it is.

    Raises:
        ModelError: If it has other weights.
    """
    settings = json.loads((adapters / CONFIG_FILE).read_text(encoding="utf-8"))
    name, base, revision = section.name_or_path, settings.get("base_model_name_or_path"), settings.get("revision")
    is_same_place = base is None or _is_same(base, prepared_location(name, folder).name_or_path)
    was = f"they were trained on {base}"
    then = _noted(adapters)
    now = None if then is None else weights_digest(section, folder)
    if then is not None and now is not None:
        if then != now:
            known = f"when the adapters in {adapters} were trained on it"
            raise ModelError(
                f"{key}: {name} has other weights than {known if is_same_place else f'{base}, which the adapters in {adapters} were trained on'}",
                hint=f"name that model, wherever it is now; a copy of the adapters without the file {BASE_FILE} is put on any model that they "
                "fit",
            )
        return None
    if not is_same_place:
        return f"{was}; {key} is {name}"
    if revision is not None and revision != section.revision:
        return f"they were trained on revision {revision}; model.revision is {section.revision or 'null'}"
    return None


def _noted(adapters: Path) -> str | None:
    """Read the digest that stands beside adapters; None: there is none."""
    path = adapters / BASE_FILE
    if not path.is_file():
        return None
    found: str = json.loads(path.read_text(encoding="utf-8"))["weights"]
    return found


def _is_same(one: str, other: str) -> bool:
    return one == other or (Path(one).exists() and Path(other).exists() and Path(one).samefile(other))
