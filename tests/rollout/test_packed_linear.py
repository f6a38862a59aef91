"""Linear layers with packed weights against PyTorch's own."""

from pathlib import Path

import pytest
import torch
from tiny_models import build_tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_cli import onednn
from grpo_cli.rollout.local import packed_linear
from grpo_cli.rollout.local.packed_linear import packed_linears


def layers() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(48, 70), nn.ReLU(), nn.Linear(70, 33, bias=False))


@pytest.fixture(autouse=True)
def gaining_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever processor this is, take oneDNN's products."""
    monkeypatch.setattr(onednn, "is_faster", lambda: True)


@pytest.mark.parametrize("shape", [(1, 48), (7, 48), (5, 1, 48), (1, 300, 48)])
def test_products_are_those_of_pytorch(shape: tuple[int, ...]) -> None:
    model = layers()
    states = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(states)
        with packed_linears(model):
            assert [("forward" in vars(layer)) for layer in model] == [True, False, True]
            found = model(states)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_weights_too_large_for_a_second_copy_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_LARGEST_SHARE", 0.0)
    model = layers()
    with packed_linears(model):
        assert all("forward" not in vars(layer) for layer in model)


def test_layers_that_are_fast_already_are_packed_and_fast_again_afterwards(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path), dtype=torch.float32)
    onednn.speed_up_linears(model)
    layer = model.model.layers[0].mlp.up_proj
    fast, states = vars(layer)["forward"], torch.randn(3, 32)
    with torch.no_grad(), packed_linears(model):
        assert vars(layer)["forward"] is not fast
        assert "forward" in vars(model.lm_head)
        torch.testing.assert_close(layer(states), fast(states), atol=1e-5, rtol=1e-5)
    assert vars(layer)["forward"] is fast
    assert "forward" not in vars(model.lm_head)


def test_they_are_as_before_afterwards_even_after_an_error() -> None:
    model = layers()
    with pytest.raises(RuntimeError, match="stop"), packed_linears(model):
        raise RuntimeError("stop")
    assert all("forward" not in vars(layer) for layer in model)


def test_new_weights_count_from_the_next_time() -> None:
    model = layers()
    states = torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), packed_linears(model):
        before = model(states)
    with torch.no_grad():
        next(model[2].parameters()).mul_(2.0)
        with packed_linears(model):
            torch.testing.assert_close(model(states), 2 * before)


def test_other_types_autocast_and_replaced_forwards_are_left_alone() -> None:
    model = layers()
    own = model[0].forward
    vars(model[0])["forward"] = own  # as accelerate's hooks do
    model[2].to(torch.bfloat16)
    with packed_linears(model):
        assert vars(model[0])["forward"] is own
        assert "forward" not in vars(model[2])
    assert vars(model[0])["forward"] is own
    model = layers()
    with torch.autocast("cpu", dtype=torch.bfloat16), packed_linears(model):
        assert all("forward" not in vars(layer) for layer in model)
