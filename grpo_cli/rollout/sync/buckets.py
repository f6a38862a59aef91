"""Weights as a stream of buckets: many tensors in one buffer of bytes, so that each trip carries much and none holds the whole model.

A bucket is `data` and the list of what lies in it. A tensor begins at a multiple of 16 bytes, the gap after it is zero, and
the places follow from the list: whoever has the list and the bytes has the tensors.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_cli.errors import TrainingError

ALIGNMENT_BYTES = 16
"""No element of any dtype lies across it, and it is whole words of the checksum."""

DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
"""What may travel, by its name there."""

_ROUTER = re.compile(r"(?:^|\.)(?:\w+_)?(?:gate|router)(?:\.|$)")
"""A part of a name that says that a matrix chooses experts, such as `mlp.gate.weight`, but not `mlp.gate_proj.weight`."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlot:
    """A tensor's place in a bucket.

    Attributes:
        name: Of the tensor in a checkpoint.
        dtype: One of `DTYPES`.
        shape: Empty for a scalar.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def place_bytes(self) -> int:
        """Bytes up to the next tensor."""
        return -(-self.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Some tensors of a model.

    Attributes:
        slots: What lies in it, in order.
        data: uint8 [bytes], on the CPU or a GPU.
    """

    slots: tuple[TensorSlot, ...]
    data: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return self.data.numel()


def pack(
    named: Iterable[tuple[str, Tensor]], *, bucket_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[Bucket]:
    """Copy tensors into buckets, one bucket at a time; each has memory of its own, which nothing writes to later.

    A tensor may be freed as soon as the next one is asked for. Drop a bucket before asking for the next, or two are held.

    A conversion makes the buckets of large weights smaller. Vectors, and the matrices that choose experts, keep the precision that
    they have: they are few bytes, and an engine in bfloat16 holds some of them in float32. It converts what it holds otherwise.

    Args:
        named: Names and tensors of any layout, all on one device.
        bucket_bytes: Size of a bucket. A larger tensor has a bucket of its own.
        dtype: What floating-point tensors of two or more dimensions are converted to, but for those that choose experts; None leaves
            all as they are.

    Yields:
        Buckets that are never empty.

    Raises:
        TrainingError: If a tensor's dtype is none of `DTYPES`.
    """
    slots: list[TensorSlot] = []
    data = torch.empty(0, dtype=torch.uint8)
    used = 0
    for name, tensor in named:
        slot = _slot_of(name, tensor, dtype)
        if slots and used + slot.place_bytes > bucket_bytes:
            yield Bucket(slots=tuple(slots), data=data[:used])
            slots = []
        if not slots:
            del data  # before the next is made: the consumer may have dropped it already
            data = torch.empty(max(bucket_bytes, slot.place_bytes), dtype=torch.uint8, device=tensor.device)
            used = 0
        _view(data, slot, used).copy_(tensor.detach())
        data[used + slot.num_bytes : used + slot.place_bytes].zero_()
        slots.append(slot)
        used += slot.place_bytes
    if slots:
        yield Bucket(slots=tuple(slots), data=data[:used])


def _slot_of(name: str, tensor: Tensor, dtype: torch.dtype | None) -> TensorSlot:
    return TensorSlot(name=name, dtype=sent_dtype(name, tensor, dtype), shape=tuple(tensor.shape))


def sent_dtype(name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Say in what precision a weight is handed over; see `pack`."""
    if tensor.dtype not in _NAMES:
        raise TrainingError(
            f"the weight {name} is {str(tensor.dtype).removeprefix('torch.')}, which cannot be sent to vLLM; allowed: {', '.join(DTYPES)}",
            hint="load the model in one of them: model.dtype",
        )
    if dtype is None or not tensor.is_floating_point() or tensor.ndim < 2 or _ROUTER.search(name):
        return tensor.dtype
    return dtype


def _view(data: Tensor, slot: TensorSlot, start: int) -> Tensor:
    return data[start : start + slot.num_bytes].view(slot.dtype).view(slot.shape)


def unpack(bucket: Bucket) -> list[tuple[str, Tensor]]:
    """Give a bucket's tensors as views of its memory, with their names."""
    return [(slot.name, _view(bucket.data, slot, start)) for slot, start in _places(bucket.slots)]


def _places(slots: Iterable[TensorSlot]) -> Iterator[tuple[TensorSlot, int]]:
    """Give each slot with the byte where it begins."""
    start = 0
    for slot in slots:
        yield slot, start
        start += slot.place_bytes


def slots_to_json(slots: Sequence[TensorSlot]) -> list[dict[str, Any]]:
    """Describe slots by what JSON has."""
    return [{"name": slot.name, "dtype": _NAMES[slot.dtype], "shape": list(slot.shape)} for slot in slots]


def slots_from_json(raw: object, *, num_bytes: int) -> tuple[TensorSlot, ...]:
    """Read what `slots_to_json` wrote and another process sent.

    Args:
        raw: A decoded JSON value.
        num_bytes: Of the bucket that the slots must fill.

    Raises:
        ValueError: If it is no such list, a dtype is unknown, or the sizes do not add up.
    """
    if not isinstance(raw, list):
        raise ValueError(f"a bucket's slots must be a list, not {str(raw)[:200]}")  # noqa: TRY004  JSON of another process
    slots = tuple(_slot_from_json(item) for item in raw)
    described = sum(slot.place_bytes for slot in slots)
    if described != num_bytes:
        raise ValueError(f"a bucket of {num_bytes} bytes cannot hold slots of {described} bytes")
    return slots


def _slot_from_json(item: object) -> TensorSlot:
    match item:
        case {"name": str(name), "dtype": str(dtype), "shape": list(shape)} if name and dtype in DTYPES:
            if all(type(size) is int and size >= 0 for size in shape):
                return TensorSlot(name=name, dtype=DTYPES[dtype], shape=tuple(shape))
    raise ValueError(f"a slot needs a name, one of the dtypes {', '.join(DTYPES)} and a shape: found {str(item)[:200]}")
