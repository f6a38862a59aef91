"""What one process tells another: tensors and JSON in one message, in which nothing can be executed."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

_TOLD = "told"
"""Name of the tensor that holds the JSON."""


def packed(tensors: Mapping[str, Tensor], told: Any) -> bytes:
    """Write tensors and something that JSON can hold as safetensors."""
    text = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    message: bytes = save({**tensors, _TOLD: text})
    return message


def unpacked(message: bytes) -> tuple[dict[str, Tensor], Any]:
    """Undo `packed`."""
    tensors: dict[str, Tensor] = load(message)
    return tensors, json.loads(tensors.pop(_TOLD).numpy().tobytes())
