"""How 4-bit weights are rounded and multiplied, against bitsandbytes' own rounding of the same weights."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit
from padded_calls import load
from tiny_models import build_tiny_model
from torch import Tensor
from transformers import AutoTokenizer

from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_model
from grpo_cli.policy.quantization import is_quantized
from grpo_cli.recipe.schema import LoraSection, ModelSection
from grpo_cli.rollout.local import LocalEngine
from grpo_cli.types import Prompt, PromptId, Sampling, Segment

KINDS = list(itertools.product(["nf4", "fp4"], [False, True]))
"""Levels, and whether scales are rounded, too."""

BLOCK = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=64, initializer_range=0.2)


def quantized(folder: Path, kind: tuple[str, bool], compute: str) -> Any:
    """A model with adapters that change nothing yet."""
    options: dict[str, Any] = {
        **dict(zip(("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"), kind, strict=True)),
        "bnb_4bit_compute_dtype": compute,
    }
    section = ModelSection(name_or_path=str(folder), lora=LoraSection(r=2), quantization="4bit", **options)
    return load_model(section, folder=folder)


def rounded(weight: Tensor, kind: tuple[str, bool]) -> Tensor:
    levels, double = kind
    bits, state = quantize_4bit(weight, quant_type=levels, compress_statistics=double)
    found: Tensor = dequantize_4bit(bits, state)
    return found


@pytest.mark.parametrize("compute", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_product_is_that_of_the_rounded_weights_in_the_precision_asked_for(
    kind: tuple[str, bool], compute: str, folder: Path
) -> None:
    """Bit for bit: rounding, then a matrix product in that precision, then back to the layers' own."""
    plain, model = load(folder), quantized(folder, kind, compute)
    layers = {name: one for name, one in model.named_modules() if is_quantized(one)}
    assert len(layers) == 2 * 7
    dtype = torch.float32 if compute == "auto" else getattr(torch, compute)
    for name, layer in layers.items():
        weight = rounded(plain.get_submodule(name.removesuffix(".base_layer")).weight.detach(), kind).to(dtype)
        rows = torch.randn(5, weight.shape[1], requires_grad=True)
        product = layer(rows)
        assert product.dtype == torch.float32
        assert torch.equal(product, (rows.to(dtype) @ weight.t()).float())
        (gradient,) = torch.autograd.grad(product.sum(), rows)
        assert torch.equal(gradient, (torch.ones_like(product, dtype=dtype) @ weight).float())


@pytest.mark.parametrize("levels", ["nf4", "fp4"])
def test_weights_become_the_nearest_level_times_the_largest_of_their_block(levels: str, folder: Path) -> None:
    """By brute force over the sixteen levels (QLoRA, Dettmers et al. 2023, section 3 and appendix E), which end at 1."""
    plain, model = load(folder), quantized(folder, (levels, False), "auto")
    name, layer = next((name, one) for name, one in model.named_modules() if is_quantized(one))
    weight = plain.get_submodule(name.removesuffix(".base_layer")).weight.detach()
    blocks = weight.reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    table: Tensor = get_4bit_type(levels, device="cpu")  # type: ignore[no-untyped-call]
    assert len(table) == 16
    assert table.max() == 1
    nearest = table[(blocks[..., None] / scales[..., None] - table).abs().argmin(dim=-1)]
    found = layer(torch.eye(weight.shape[1])).t().reshape(-1, BLOCK)
    off = (found - nearest * scales).abs()
    # A weight half-way between two levels may go to either.
    step = (table.sort().values.diff().max() / 2 + 1e-3) * scales
    assert (off > 1e-5 * scales).float().mean() < 0.01
    assert ((found - blocks).abs() <= step).all()


@pytest.mark.parametrize("compute", ["auto", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_sampled_has_the_log_probabilities_of_the_training_forward(
    kind: tuple[str, bool], compute: str, folder: Path
) -> None:
    model = quantized(folder, kind, compute)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    sampling = Sampling(stop_ids=(257,), max_tokens=12)
    prompts = [
        Prompt(uid=PromptId(f"0:{number}"), ids=ids, text="", messages=None, row={})
        for number, ids in enumerate([(5, 6, 7, 8, 9), (40, 41)])
    ]
    engine = LocalEngine(model, AutoTokenizer.from_pretrained(folder), max_num_seqs=8)
    assert engine.notices == [], "the fast decoder is right as far as this precision can tell"
    groups = engine.generate(prompts, sampling, num_generations=3, seed_key=(0,))
    policy = PolicyModel(model, sampling=sampling)
    policy.share_prefix()
    segments = tuple(
        Segment(prompt_ids=one.prompt.ids, completion_ids=tuple(each.ids for each in one.completions)) for one in groups
    )
    with torch.no_grad():
        trained = policy(segments).logps
    sampled = torch.cat([each.logps for one in groups for each in one.completions])
    # In bfloat16 sums of other shapes are rounded after other roundings: 8 bits, through two layers.
    torch.testing.assert_close(sampled, trained, rtol=0, atol=1e-4 if compute == "auto" else 0.1)
    assert (sampled - trained).abs().mean() < (1e-5 if compute == "auto" else 0.02)
