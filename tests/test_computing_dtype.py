"""What a model computes in is the least precise of all that takes part."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatched import Dispatched
from tiny_models import build_tiny_model

from grpo_cli.policy.load import load_model
from grpo_cli.precision import computing_dtype, is_reduced, rounded_once
from grpo_cli.recipe.schema import LoraSection, ModelSection


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"quantization": "8bit"}, torch.float32),
        ({"quantization": "4bit"}, torch.float32),
        ({"quantization": "4bit", "bnb_4bit_compute_dtype": "bfloat16"}, torch.bfloat16),
        ({"quantization": "4bit", "dtype": "bfloat16", "bnb_4bit_compute_dtype": "float32"}, torch.bfloat16),
    ],
    ids=str,
)
def test_it_is_that_of_weights_or_of_quantized_products(
    settings: dict[str, Any], expected: torch.dtype, tmp_path: Path
) -> None:
    folder = build_tiny_model(tmp_path, hidden_size=64)
    model = load_model(ModelSection(name_or_path=str(folder), lora=LoraSection(r=2), **settings), folder=folder)
    assert computing_dtype(model) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert computing_dtype(model) == torch.bfloat16


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float16), ("bfloat16", torch.bfloat16)])
def test_float32_products_that_may_be_rounded_are_reduced(dtype: Any, expected: torch.dtype, tmp_path: Path) -> None:
    """TF32 has ten bits of a fraction, as float16."""
    folder = build_tiny_model(tmp_path)
    model = load_model(ModelSection(name_or_path=str(folder), dtype=dtype), folder=folder)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert computing_dtype(model) == expected
    finally:
        torch.set_float32_matmul_precision(before)


def test_float32_and_more_are_not_reduced() -> None:
    kinds = torch.float64, torch.float32, torch.bfloat16, torch.float16
    assert [is_reduced(kind) for kind in kinds] == [False, False, True, True]


@pytest.mark.parametrize("once", [False, True])
def test_frozen_weights_are_rounded_once(tmp_path: Path, *, once: bool) -> None:
    folder = build_tiny_model(tmp_path)
    model = load_model(ModelSection(name_or_path=str(folder), lora=LoraSection(r=2)), folder=folder).eval()
    frozen = {one.data_ptr(): name for name, one in model.named_parameters() if not one.requires_grad}
    ids = torch.arange(5, 9)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        expected = model(input_ids=ids).logits
    keeping = rounded_once(model) if once else nullcontext()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=True), keeping, Dispatched() as seen:
        logits = [model(input_ids=ids).logits for _ in range(3)]
    rounded = Counter(frozen[one.data_ptr()] for (one,) in seen.named("_to_copy") if one.data_ptr() in frozen)
    assert (
        len(rounded) >= 7 * model.config.num_hidden_layers
    )  # seven matrices of a layer; the head's is the embedding's
    assert set(rounded.values()) == {1 if once else 3}
    assert all(torch.equal(one, expected) for one in logits)
    assert {name for name, one in model.named_parameters() if not one.requires_grad} == set(frozen.values())
