"""Weights under the names and in the shapes that a checkpoint has, which is what an engine loads."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from grpo_cli.errors import ModelError

_WITH_PREFIX = frozenset({"CLIPVisionModel", "SiglipVisionModel"})
"""Vision towers whose weights checkpoints have below a `vision_model`, which vLLM counts on, and transformers itself no longer has."""

_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""The beginning of a name, up to the number of the layer."""


def checkpoint_names(model: Any, named: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Stream a model's weights as a checkpoint of it has them.

    transformers keeps some weights in another form in memory, such as the experts of a layer as one tensor. That is undone
    tensor by tensor, or layer by layer where several tensors become one. The weights of other models pass through untouched. Those of
    some vision towers get names as in the checkpoints that their makers have published; layers whose outcome is not used are left out.

    Args:
        model: A transformers model without wrappers.
        named: Names and tensors as they are in the model; can be iterated again, and so can the result.

    Raises:
        ModelError: If tensors of several layers become one.
    """
    split = _split(model, named)
    checkpoint = named if split is None else _CheckpointNames(model, named, split)
    towers = {
        name.rpartition(".")[2]: part for name, part in model.named_modules() if type(part).__name__ in _WITH_PREFIX
    }
    return (
        _TowerNames(checkpoint, {name: _layers_used(model, part) for name, part in towers.items()})
        if towers
        else checkpoint
    )


class _TowerNames:
    """Weights of which those of vision towers are below a `vision_model`, without what is behind the last layer that features are of."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], used: Mapping[str, int | None]) -> None:
        self._named = named
        self._used = used
        self._tower = re.compile(rf"(?:^|\.)({'|'.join(used)})\.(?:vision_model\.)?(?=(.+))")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._named:
            found = self._tower.search(name)
            if found is None:
                yield name, tensor
            elif not _is_behind(found[2], self._used[found[1]]):
                yield f"{name[: found.end(1)]}.vision_model.{found[2]}", tensor


def _layers_used(model: Any, tower: Any) -> int | None:
    """Count the layers of a vision tower whose outcome the language model sees; None: all, and what comes after them."""
    wanted = getattr(model.config, "vision_feature_layer", None)
    if wanted is None:
        return None
    layers: int = tower.config.num_hidden_layers
    last = max(layer % (layers + 1) for layer in ([wanted] if isinstance(wanted, int) else wanted))
    return last if last < layers else None


def _is_behind(name: str, used: int | None) -> bool:
    """Tell whether a weight of a vision tower takes no part in what the language model sees: vLLM has no such layers."""
    if used is None:
        return False
    layer = re.match(r"encoder\.layers\.(\d+)\.", name)
    return name.startswith("post_layernorm.") or (layer is not None and int(layer[1]) >= used)


class _CheckpointNames:
    """Weights on the way back to a checkpoint's form, one part of the model at a time."""

    def __init__(self, model: Any, named: Iterable[tuple[str, Tensor]], split: Callable[[str], str]) -> None:
        self._model = model
        self._named = named
        self._split = split

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return _reverted(self._model, self._named, self._split)


def _reverted(
    model: Any, named: Iterable[tuple[str, Tensor]], split: Callable[[str], str]
) -> Iterator[tuple[str, Tensor]]:
    """Revert consecutive tensors together whose names `split` maps to the same."""
    for _, part in groupby(named, key=lambda item: split(item[0])):
        yield from revert_weight_conversion(model, dict(part)).items()


def _split(model: Any, named: Iterable[tuple[str, Tensor]]) -> Callable[[str], str] | None:
    """Find the smallest parts that can be reverted alone, by trying it without data; None if there is nothing to revert."""
    weights = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in named}
    whole: Mapping[str, Tensor] = revert_weight_conversion(model, dict(weights))
    if all(whole.get(name) is weight for name, weight in weights.items()):
        return None
    for split in (_itself, _layer):
        if _shapes(_reverted(model, weights.items(), split)) == _shapes(whole.items()):
            return split
    raise ModelError(
        f"{type(model).__name__}: a checkpoint has tensors made from several layers of the model, which cannot be sent to vLLM "
        "one layer at a time",
        hint="use the built-in engine: leave vllm.mode out",
    )


def _itself(name: str) -> str:
    return name


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return name if found is None else found.group()


def _shapes(named: Iterable[tuple[str, Tensor]]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in named}
