"""Quantized weights: what a layer computes, what is sent and exported, and that log-probabilities are a token's own."""

import gc
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from padded_calls import GROUP, SAMPLING, SEGMENTS, gradients, in_parts, load, whole
from tiny_models import build_tiny_model

from grpo_cli.engine.strategies.replicas import NamedWeights
from grpo_cli.errors import ModelError
from grpo_cli.policy import quantization
from grpo_cli.policy.adapter_weights import MergedWeights
from grpo_cli.policy.adapters import attach_adapters, save_adapters, without_adapters
from grpo_cli.policy.agreement import choose_forward
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_model, load_shapes
from grpo_cli.policy.merge import merged_model
from grpo_cli.policy.quantization import (
    DequantizedWeights,
    dequantized,
    is_quantized,
    plan_quantization,
    write_quantization,
)
from grpo_cli.recipe.schema import LoraSection, ModelSection
from grpo_cli.sharding import whole_bytes, whole_shape

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"quantization": "4bit"},
    "fp4, scales too": {
        "quantization": "4bit",
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
    },
    "8bit": {"quantization": "8bit"},
}
pytestmark = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=64, initializer_range=0.2)


def section_of(kind: str, folder: Path, **lora: Any) -> ModelSection:
    return ModelSection(name_or_path=str(folder), lora=LoraSection(**{"r": 2, **lora}), **KINDS[kind])


def trained(kind: str, folder: Path, **lora: Any) -> Any:
    """Adapters that change something, on quantized weights."""
    model = load_model(section_of(kind, folder, **lora), folder=folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logps(model: Any, *, shared: bool = False) -> torch.Tensor:
    policy = PolicyModel(model, sampling=SAMPLING)
    if shared:
        policy.share_prefix()
    with torch.no_grad():
        found: torch.Tensor = policy(SEGMENTS).logps
    policy.feed_prompts_apart()
    return found


def test_weights_are_rounded_and_a_layer_multiplies_with_what_they_became(kind: str, folder: Path) -> None:
    plain, model = load(folder), load_model(section_of(kind, folder), folder=folder)
    layers = {name: one for name, one in model.named_modules() if is_quantized(one)}
    assert len(layers) == 2 * 7
    rows = torch.randn(5, 64, requires_grad=True)
    for name, layer in layers.items():
        rounded, weight = dequantized(layer), plain.get_submodule(name.removesuffix(".base_layer")).weight
        off = (rounded - weight).norm() / weight.norm()
        assert 1e-3 < off < (0.02 if kind == "8bit" else 0.15), "about half a step of 255, or of 16 levels"
        if layer.in_features == 64:
            # What bitsandbytes would do on a GPU it does here outside of training mode.
            product = layer.eval()(rows)
            torch.testing.assert_close(product, rows @ rounded.t(), rtol=1e-5, atol=1e-5)
            (gradient,) = torch.autograd.grad(product.sum(), rows)
            torch.testing.assert_close(gradient, rounded.sum(dim=0).expand(5, 64), rtol=1e-4, atol=1e-4)


def test_products_are_computed_in_the_precision_that_was_asked_for(kind: str, folder: Path) -> None:
    """In autocast, too, which would choose bfloat16: 8 bits of a number."""
    layer = next(one for one in load_model(section_of(kind, folder), folder=folder).modules() if is_quantized(one))
    product_of: Any = quantization._FrozenProduct.apply
    rows = torch.randn(5, 64, requires_grad=True)
    for inner, most in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = product_of(rows.to(inner), layer)
            (gradient,) = torch.autograd.grad(product.sum(), rows)
        expected = rows @ dequantized(layer).t()
        assert product.dtype == inner
        assert (product - expected).norm() < most * expected.norm()
        wanted = dequantized(layer).sum(dim=0).expand(5, 64)
        assert (gradient - wanted).norm() < most * wanted.norm()


@pytest.mark.parametrize("dora", [False, True])
def test_what_is_sent_says_what_the_policy_says(kind: str, dora: bool, folder: Path) -> None:
    model, plain = trained(kind, folder, use_dora=dora), load(folder)
    said = logps(model)
    merged = dict(MergedWeights(model, DequantizedWeights(model, NamedWeights(model))))
    assert {name: one.shape for name, one in merged.items()} == {name: one.shape for name, one in NamedWeights(plain)}
    before = logps(plain)
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logps(plain), said, rtol=1e-4, atol=1e-4)
    assert (before - said).abs().max() > 0.01
    with without_adapters(model):
        below = logps(model)
    assert (below - before).abs().max() > 1e-3, "the reference has rounded weights, too"


def test_log_probabilities_do_not_depend_on_what_else_is_in_the_batch(kind: str, folder: Path) -> None:
    """Shared prompts, groups in parts and the agreement at the start of a run all hold; large numbers among the inputs change nothing."""
    model = trained(kind, folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[40] *= (
            50  # the prompt of another group: beyond the 6 above which bitsandbytes treats columns apart
        )
    alone = PolicyModel(model, sampling=SAMPLING)((GROUP,)).logps
    torch.testing.assert_close(logps(model)[: len(alone)], alone, rtol=1e-4, atol=1e-4)
    policy = PolicyModel(model, sampling=SAMPLING)
    assert choose_forward(policy, SEGMENTS, share_prefix=True) == []
    assert policy.shares_prefix
    assert policy.splits_prompts
    weights = torch.linspace(-1, 1, len(alone))
    expected, _ = whole(policy, weights)
    wanted = gradients(model)
    model.zero_grad()
    found, _ = in_parts(policy, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-3, msg=name)


def test_merged_they_are_a_whole_model_that_says_the_same(kind: str, folder: Path, tmp_path: Path) -> None:
    model = trained(kind, folder, modules_to_save=["embed_tokens"])
    save_adapters(model, tmp_path)
    write_quantization(section_of(kind, folder), tmp_path)
    whole_model = merged_model(tmp_path)
    assert not any(is_quantized(one) for one in whole_model.modules())
    torch.testing.assert_close(logps(whole_model), logps(model), rtol=1e-4, atol=1e-4)


def test_they_take_a_part_of_the_memory_as_planned(kind: str, folder: Path) -> None:
    section = section_of(kind, folder)
    model, planned = load_model(section, folder=folder), load_shapes(section, folder=folder)
    attach_adapters(planned, LoraSection(r=2))
    plan_quantization(planned, section)
    sizes = [whole_bytes(one.weight) / dequantized(one).nbytes for one in model.modules() if is_quantized(one)]
    assert sizes == pytest.approx([{"8bit": 0.25, "nf4": 0.125 + 1 / 64}.get(kind, 0.125 + 1 / 256)] * 14, rel=0.01)
    for (name, one), (_, other) in zip(model.named_parameters(), planned.named_parameters(), strict=True):
        assert whole_shape(one) == whole_shape(other), name
        assert whole_bytes(one) == pytest.approx(whole_bytes(other), rel=0.01), name


@pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is read as Linux tells it")
def test_nothing_is_held_of_the_files_that_weights_were_rounded_from(kind: str, folder: Path, tmp_path: Path) -> None:
    """The kernel says so. Embeddings and norms need no rounding: as parts of the file they would hold all of it."""
    own = Path(shutil.copytree(folder, tmp_path / "model"))

    def is_mapped() -> bool:
        gc.collect()
        return str(own / "model.safetensors") in Path("/proc/self/maps").read_text(encoding="utf-8")

    model = load_model(section_of(kind, own), folder=own)
    assert not is_mapped()
    plain = load(own)
    assert is_mapped(), "as it is where nothing is rounded"
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)


def test_what_cannot_be_is_refused_in_a_line(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"model\.lora\.modules_to_save: .*q_proj is quantized"):
        load_model(section_of(kind, folder, modules_to_save=["q_proj"], target_modules=["v_proj"]), folder=folder)
    monkeypatch.setattr(quantization, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="bitsandbytes is not installed here") as caught:
        load_model(section_of(kind, folder), folder=folder)
    assert caught.value.hint == 'pip install "grpo-cli[quantization]"'
