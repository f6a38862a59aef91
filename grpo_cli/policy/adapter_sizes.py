"""The sizes of adapters in a file, and whether a model's layers have them, of whatever kind the adapters are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from grpo_cli.errors import ModelError
from grpo_cli.policy.adapter_settings import WEIGHTS_FILE

PREFIX = "base_model.model."
"""What PEFT puts before the names in its files."""


def sizes_in(folder: Path) -> dict[str, torch.Size]:
    """Read the shapes of adapters, under the names that their file has without PEFT's prefix; no weight is read."""
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        names = file.keys()
        return {name.removeprefix(PREFIX): torch.Size(file.get_slice(name).get_shape()) for name in names}


def check_layers(model: Any, folder: Path, *, key: str, name: str, all_of_them: bool = True) -> None:
    """See that a model has the layers that adapters were made for, and these are as wide.

    Args:
        model: Without adapters; it needs no weights.
        folder: Of the adapters.
        key: What names that model.
        name: What it says.
        all_of_them: Whether each has to be there under the name that the file has, which may be one of an older version of transformers.

    Raises:
        ModelError: If it has not.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        return
    problem = next(_problems(model, sizes_in(folder), all_of_them=all_of_them), None)
    if problem is not None:
        raise ModelError(
            f"{key}: {name} is another model than the adapters in {folder} were trained on: {problem}",
            hint="name the model that they were trained on",
        )


def _problems(model: nn.Module, sizes: dict[str, torch.Size], *, all_of_them: bool) -> Iterator[str]:
    layers, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    for name, size in sizes.items():
        owner, _, kind = name.partition(".lora_")
        layer = layers.get(owner)
        if all_of_them and kind and layer is None:
            yield f"it has no {owner}"
        if name in parameters and parameters[name].shape != size:  # of a module that was trained whole
            yield f"{name} is {list(parameters[name].shape)}, and was {list(size)}"
        elif kind.startswith("A.") and (found := _widths(layer)) and found[0] != size[1]:
            yield f"{owner} has {found[0]:,} inputs, and had {size[1]:,}"
        elif kind.startswith("B.") and (found := _widths(layer)) and found[1] != size[0]:
            yield f"{owner} has {found[1]:,} outputs, and had {size[0]:,}"


def _widths(layer: nn.Module | None) -> tuple[int, int] | None:
    """Give the inputs and outputs of a linear layer; None: it is none."""
    match layer:
        case nn.Linear():
            return layer.in_features, layer.out_features
        case Conv1D():
            inputs, outputs = layer.weight.shape
            return inputs, outputs
        case _:
            return None
