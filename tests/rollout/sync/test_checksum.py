"""The checksum of streamed weights: against its definition in plain integers, and against mistakes that it must notice."""

import hashlib
import json

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from grpo_cli.rollout.sync.buckets import pack
from grpo_cli.rollout.sync.checksum import Checksum

ROW = 16384


def checksum(named: list[tuple[str, Tensor]], bucket_bytes: int = 1 << 20) -> str:
    total = Checksum()
    for bucket in pack(named, bucket_bytes=bucket_bytes):
        total.add(bucket)
    return total.value


def by_definition(named: list[tuple[str, Tensor]]) -> str:
    """As the docstring of `Checksum` says, in Python's integers."""
    drawn = hashlib.shake_128(b"grpo weights").digest(8 * ROW)
    factors = [int.from_bytes(drawn[8 * i : 8 * i + 8], "little", signed=True) for i in range(ROW)]
    chain = hashlib.blake2b(digest_size=16)
    for name, tensor in named:
        shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        chain.update(json.dumps({"name": name, "dtype": dtype, "shape": shape}).encode())
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        raw += bytes(-len(raw) % 16)
        words = [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)]
        rows = [words[i : i + ROW] for i in range(0, len(words) // ROW * ROW, ROW)] + [words[len(words) // ROW * ROW :]]
        for row in rows:
            value = sum(k * w for k, w in zip(factors, row, strict=False)) % 2**64
            chain.update(value.to_bytes(8, "little"))
    return chain.hexdigest()


def model(seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embedding", torch.randn(300, 70, generator=generator)),
        ("first", torch.randn(50, 40, generator=generator)),
        ("second", torch.randn(50, 40, generator=generator)),
        ("half", torch.randn(33, generator=generator).bfloat16()),
        ("scale", torch.tensor(0.5)),
        ("empty", torch.zeros(0, 3)),
    ]


def test_it_is_what_its_definition_says() -> None:
    assert checksum(model()) == by_definition(model())


@given(bucket_bytes=st.integers(1, 100_000))
def test_it_does_not_depend_on_the_size_of_buckets(bucket_bytes: int) -> None:
    assert checksum(model(), bucket_bytes) == checksum(model())


@given(data=st.data())
def test_one_flipped_bit_changes_it(data: st.DataObject) -> None:
    named = model()
    _, tensor = named[data.draw(st.integers(0, 4))]
    raw = tensor.view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(named) != checksum(model())


@given(data=st.data())
def test_two_elements_that_change_places_change_it(data: st.DataObject) -> None:
    """Also elements that differ in their sign alone, or lie in different rows of the sums."""
    values = torch.tensor([1.0, -1.0, 2.0, 0.0]).repeat(10_000)
    places = st.integers(0, len(values) - 1)
    left, right = data.draw(places), data.draw(places)
    assume(left % 4 != right % 4)
    swapped = values.clone()
    swapped[left], swapped[right] = values[right], values[left]
    assert checksum([("a", swapped)]) != checksum([("a", values)])


@pytest.mark.parametrize(
    "change",
    [
        lambda named: [named[0], ("first", named[2][1]), ("second", named[1][1]), *named[3:]],
        lambda named: [named[0], named[2], named[1], *named[3:]],
        lambda named: [("other", named[0][1]), *named[1:]],
        lambda named: [("embedding", named[0][1].view(70, 300)), *named[1:]],
        lambda named: [*named[:3], ("half", named[3][1].view(torch.float16)), *named[4:]],
        lambda named: named[:-1],
        lambda named: named[1:],
        lambda _: model(seed=1),
    ],
    ids=["tensors swapped", "order", "name", "shape", "dtype", "one less", "first missing", "other values"],
)
def test_other_weights_have_another_one(change: object) -> None:
    assert callable(change)
    assert checksum(change(model())) != checksum(model())


def test_it_is_32_hexadecimal_digits() -> None:
    assert len(bytes.fromhex(checksum(model()))) == 16
