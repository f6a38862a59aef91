"""Packing weights into buckets: nothing is lost, and never more than one bucket is held."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.sync.buckets import ALIGNMENT_BYTES, Bucket, pack, slots_from_json, slots_to_json, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
MODELS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()), min_size=1, max_size=12
)
"""Of each tensor its dtype, its shape (a scalar if there is none, empty if one size is 0), and whether it is a transposed view."""


def build(specification: Iterable[tuple[torch.dtype, list[int], bool]]) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    named = []
    for number, (dtype, shape, transposed) in enumerate(specification):
        tensor = torch.randint(-128, 128, shape, generator=generator).to(dtype)
        named.append((f"layer.{number}", tensor.mT if transposed and tensor.ndim > 1 else tensor))
    return named


def equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


@given(specification=MODELS, bucket_bytes=st.integers(1, 400))
def test_every_tensor_comes_back_in_order_with_its_dtype_shape_and_values(
    specification: list[tuple[torch.dtype, list[int], bool]], bucket_bytes: int
) -> None:
    named = build(specification)
    buckets = list(pack(named, bucket_bytes=bucket_bytes))
    back = [item for bucket in buckets for item in unpack(bucket)]
    assert [name for name, _ in back] == [name for name, _ in named]
    assert all(equal(left, right) for (_, left), (_, right) in zip(named, back, strict=True))
    for bucket in buckets:
        assert bucket.slots
        assert bucket.num_bytes <= bucket_bytes or len([slot for slot in bucket.slots if slot.num_bytes]) == 1
        assert all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for _, tensor in unpack(bucket) if tensor.numel())


@given(specification=MODELS)
def test_only_floating_point_matrices_are_converted(specification: list[tuple[torch.dtype, list[int], bool]]) -> None:
    named = build(specification)
    buckets = list(pack(named, bucket_bytes=1 << 20, dtype=torch.bfloat16))
    for (_, sent), (_, received) in zip(named, [item for bucket in buckets for item in unpack(bucket)], strict=True):
        assert equal(received, sent.to(torch.bfloat16) if sent.is_floating_point() and sent.ndim > 1 else sent)


@pytest.mark.parametrize(
    ("name", "shape", "sent"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (4, 4), torch.bfloat16),
        ("model.layers.0.mlp.gate_proj.weight", (4, 4), torch.bfloat16),
        ("model.layers.0.mlp.experts.1.gate_up_proj.weight", (4, 4), torch.bfloat16),
        ("model.layers.0.mlp.gate.weight", (4, 4), torch.float32),
        ("model.layers.0.block_sparse_moe.gate.weight", (4, 4), torch.float32),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 4), torch.float32),
        ("model.layers.0.mlp.router.weight", (4, 4), torch.float32),
        ("model.layers.0.block_sparse_moe.router.layer.weight", (4, 4), torch.float32),
        ("model.layers.0.mlp.gate.e_score_correction_bias", (4,), torch.float32),
        ("model.layers.0.mamba.A_log", (4,), torch.float32),
    ],
)
def test_what_an_engine_may_hold_in_float32_keeps_its_precision(
    name: str, shape: tuple[int, ...], sent: torch.dtype
) -> None:
    (bucket,) = pack([(name, torch.full(shape, 1.001))], bucket_bytes=100, dtype=torch.bfloat16)
    ((_, received),) = unpack(bucket)
    assert equal(received, torch.full(shape, 1.001).to(sent))


def test_gaps_between_tensors_are_zero_so_that_equal_weights_are_equal_bytes() -> None:
    named = [("a", torch.ones(3, dtype=torch.int8)), ("b", torch.ones(1))]
    (bucket,) = pack(named, bucket_bytes=100)
    assert bucket.data.tolist() == [1] * 3 + [0] * 13 + list(torch.ones(1).view(torch.uint8)) + [0] * 12


def test_buckets_are_filled_before_the_next_begins() -> None:
    named = [(str(number), torch.zeros(16, dtype=torch.int8)) for number in range(10)]
    assert [len(bucket.slots) for bucket in pack(named, bucket_bytes=64)] == [4, 4, 2]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of all tensors that are made while it is active and still exist, besides that of the weights."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[Any, int]] = {}
        self.weights = {tensor.untyped_storage()._cdata for tensor in weights}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage()._cdata not in self.weights:
            storage = result.untyped_storage()
            self.made = {key: item for key, item in self.made.items() if not item[0].expired()}
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self.made.setdefault(storage._cdata, (reference, storage.nbytes()))
            self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return result


def test_no_more_than_one_bucket_is_held_besides_the_weights() -> None:
    named = [(str(number), torch.zeros(300)) for number in range(40)] + [("large", torch.zeros(2000))]
    with LiveBytes(tensor for _, tensor in named) as live:
        num_buckets = 0
        for bucket in pack(named, bucket_bytes=4096):
            num_buckets += 1
            assert bucket.data.untyped_storage().nbytes() <= 8000
            del bucket
    assert num_buckets == 15
    assert live.peak == 8000  # the large tensor's own, which no full bucket of 4096 bytes may lie beside


def test_a_bucket_keeps_its_values_when_later_ones_are_made() -> None:
    named = [(str(number), torch.full((64,), float(number))) for number in range(6)]
    kept = list(pack(named, bucket_bytes=256))
    assert [tensor.tolist() for bucket in kept for _, tensor in unpack(bucket)] == [[n] * 64 for n in range(6)]


@given(specification=MODELS)
def test_slots_survive_json(specification: list[tuple[torch.dtype, list[int], bool]]) -> None:
    for bucket in pack(build(specification), bucket_bytes=200):
        raw = json.loads(json.dumps(slots_to_json(bucket.slots)))
        assert slots_from_json(raw, num_bytes=bucket.num_bytes) == bucket.slots


@pytest.mark.parametrize(
    "raw",
    [
        None,
        {},
        [{}],
        ["a"],
        [{"name": "", "dtype": "int8", "shape": [16]}],
        [{"name": "a", "dtype": "complex64", "shape": [2]}],
        [{"name": "a", "dtype": "__class__", "shape": [16]}],
        [{"name": "a", "dtype": "int8", "shape": [-16]}],
        [{"name": "a", "dtype": "int8", "shape": [16.0]}],
        [{"name": "a", "dtype": "int8", "shape": [True, 16]}],
        [{"name": "a", "dtype": "int8", "shape": 16}],
        [{"name": "a", "dtype": "int8", "shape": [17]}],
        [{"name": "a", "dtype": "int8", "shape": [16]}, {"name": "b", "dtype": "int8", "shape": [1]}],
        [],
    ],
)
def test_slots_that_another_process_sent_are_not_trusted(raw: object) -> None:
    with pytest.raises(ValueError, match="slot"):
        slots_from_json(raw, num_bytes=16)


def test_a_dtype_that_cannot_travel_is_named() -> None:
    with pytest.raises(TrainingError, match=r"the weight rotations is float8_e4m3fn, .*allowed: float64, float32"):
        list(pack([("rotations", torch.zeros(2, 2).to(torch.float8_e4m3fn))], bucket_bytes=100, dtype=torch.bfloat16))


def test_nothing_gives_no_bucket() -> None:
    assert list(pack([], bucket_bytes=100)) == []


def test_parameters_that_need_gradients_can_be_sent() -> None:
    (bucket,) = pack([("weight", torch.nn.Parameter(torch.ones(4)))], bucket_bytes=100)
    assert isinstance(bucket, Bucket)
    assert not bucket.data.requires_grad
