"""Products through oneDNN against PyTorch's own."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build_tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_cli import onednn

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def gaining_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever processor this is, take oneDNN's products."""
    monkeypatch.setattr(onednn, "is_faster", lambda: True)


@pytest.fixture
def fresh_answer() -> Iterator[None]:
    onednn.is_faster.cache_clear()
    yield
    onednn.is_faster.cache_clear()


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(build_tiny_model(folder, **options), dtype=torch.float32)


@pytest.mark.usefixtures("gaining_processor")
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
def test_logits_and_gradients_are_those_of_the_plain_layers(family: str, tmp_path: Path) -> None:
    plain = load(tmp_path, family=family)
    fast = copy.deepcopy(plain)
    onednn.speed_up_linears(fast)
    for model in (plain, fast):
        model(input_ids=IDS).logits.square().sum().backward()
    torch.testing.assert_close(fast(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    for (name, found), expected in zip(fast.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad, expected.grad, rtol=1e-3, atol=1e-4 * float(expected.grad.abs().max()), msg=name
        )


@pytest.mark.usefixtures("gaining_processor")
def test_frozen_weights_get_no_gradient_and_inputs_do(tmp_path: Path) -> None:
    model = load(tmp_path).requires_grad_(requires_grad=False)
    onednn.speed_up_linears(model)
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=embeddings).logits.sum().backward()
    assert embeddings.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("gaining_processor")
def test_a_copy_multiplies_by_its_own_weights(tmp_path: Path) -> None:
    model = load(tmp_path)
    onednn.speed_up_linears(model)
    copied = copy.deepcopy(model)
    before = copied(input_ids=IDS).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(copied(input_ids=IDS).logits, before)
    assert model(input_ids=IDS).logits.abs().max() == 0


@pytest.mark.usefixtures("gaining_processor")
def test_the_head_and_other_kinds_of_layers_are_left_alone(tmp_path: Path) -> None:
    class Own(nn.Linear):
        pass

    model = load(tmp_path)
    own = Own(32, 32, bias=False)
    model.model.layers[0].self_attn.q_proj = own
    onednn.speed_up_linears(model)
    assert "forward" not in vars(own)
    assert "forward" not in vars(model.lm_head)
    assert "forward" in vars(model.model.layers[1].self_attn.q_proj)


@pytest.mark.usefixtures("gaining_processor")
def test_autocast_and_other_precisions_are_followed(tmp_path: Path) -> None:
    model = load(tmp_path)
    onednn.speed_up_linears(model)
    layer = model.model.layers[0].mlp.up_proj
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(3, 32)).dtype == torch.bfloat16
    assert layer.double()(torch.randn(3, 32, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.usefixtures("fresh_answer")
@pytest.mark.parametrize(
    ("description", "gains"),
    [
        ("vendor_id : AuthenticAMD\nflags : sse2 avx2 avx512f avx512bw", True),
        ("vendor_id : AuthenticAMD\nflags : sse2 avx2", False),
        ("vendor_id : GenuineIntel\nflags : sse2 avx2 avx512f", False),
        (None, False),
    ],
)
def test_only_other_makers_processors_with_avx_512_gain(
    description: str | None, gains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if description is not None:
        (tmp_path / "cpuinfo").write_text(description)
    monkeypatch.setattr(onednn, "PROCESSORS", tmp_path / "cpuinfo")
    assert onednn.is_faster() is gains
