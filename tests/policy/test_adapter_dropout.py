"""Dropout on adapters: what it leaves out, for whom, and that nothing but the weights moves a ratio."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from padded_calls import GROUP, SAMPLING, SEGMENTS, backward, gradients, in_parts, whole
from peft.tuners.lora import LoraLayer

from grpo_cli.policy.adapter_dropout import DroppedInputs, dropped_inputs
from grpo_cli.policy.adapters import without_adapters
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_model
from grpo_cli.recipe.schema import LoraSection, ModelSection
from grpo_cli.types import Segment


@pytest.fixture
def policy(tiny_model_folder: Path) -> PolicyModel:
    """With half of the inputs of trained adapters left out."""
    section = ModelSection(name_or_path=str(tiny_model_folder), lora=LoraSection(r=4, dropout=0.5))
    model = load_model(section, folder=tiny_model_folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    found = PolicyModel(model, sampling=SAMPLING)
    found.share_prefix()
    return found


def logps(policy: PolicyModel, segments: Sequence[Segment] = SEGMENTS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = policy(tuple(segments)).logps
    return found


def test_it_is_what_adapters_without_these_inputs_say(policy: PolicyModel) -> None:
    """The mask is put into A itself: its columns are 0 or twice as large."""
    plain = logps(policy)
    with dropped_inputs(policy.model, 7, 0):
        dropped = logps(policy)
        masks = {name: one.lora_dropout["default"].mask for name, one in layers(policy.model)}
    assert (dropped - plain).abs().max() > 0.01
    assert torch.equal(logps(policy), plain), "samplers, reference and canary use all inputs"
    shares = torch.cat([(mask == 0).float() for mask in masks.values()])
    assert 0.4 < shares.mean() < 0.6
    assert all(set(mask.tolist()) <= {0.0, 2.0} for mask in masks.values())
    assert len({tuple(mask.tolist()) for mask in masks.values()}) == len(masks), "each layer has its own"
    for name, layer in layers(policy.model):
        layer.lora_A["default"].weight.data *= masks[name]
    torch.testing.assert_close(logps(policy), dropped, rtol=1e-5, atol=1e-5)


def layers(model: Any) -> list[tuple[str, Any]]:
    return [(name, one) for name, one in model.named_modules() if isinstance(one, LoraLayer)]


def test_it_depends_on_its_key_alone(policy: PolicyModel) -> None:
    found: list[torch.Tensor] = []
    for key in ((7, 0), (7, 1), (8, 0), (7, 0)):
        torch.manual_seed(len(found))
        with dropped_inputs(policy.model, *key):
            found.append(logps(policy))
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_it_does_not_depend_on_how_tokens_are_laid_out(policy: PolicyModel) -> None:
    """Packed, padded, a group alone, or in parts that share their prompt: the same numbers and gradients."""
    weights = torch.linspace(-1, 1, sum(map(len, GROUP.completion_ids)))
    with dropped_inputs(policy.model, 7, 0):
        expected, _ = whole(policy, weights)
        wanted = gradients(policy.model)
        together = logps(policy)
        policy.model.zero_grad()
        found, _ = in_parts(policy, weights)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(together[: len(expected)], expected, rtol=1e-5, atol=1e-5)
        for name, gradient in gradients(policy.model).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4, msg=name)
        policy.feed_prompts_apart()
        torch.testing.assert_close(logps(policy), together, rtol=1e-4, atol=1e-4)


def test_gradients_are_others_and_inputs_that_are_left_out_have_none(policy: PolicyModel) -> None:
    backward(policy((GROUP,)).logps, torch.ones(sum(map(len, GROUP.completion_ids))))
    plain = gradients(policy.model)
    policy.model.zero_grad()
    with dropped_inputs(policy.model, 7, 0):
        backward(policy((GROUP,)).logps, torch.ones(sum(map(len, GROUP.completion_ids))))
        for name, layer in layers(policy.model):
            mask, gradient = layer.lora_dropout["default"].mask, layer.lora_A["default"].weight.grad
            assert (gradient[:, mask == 0] == 0).all()
            assert (gradient[:, mask != 0] != 0).any()
            assert not torch.allclose(gradient, plain[f"{name}.lora_A.default.weight"], rtol=1e-2)


def test_the_reference_has_none(policy: PolicyModel) -> None:
    with without_adapters(policy.model):
        expected = logps(policy)
        with dropped_inputs(policy.model, 7, 0):
            assert torch.equal(logps(policy), expected)


def test_a_mask_goes_to_where_the_inputs_are() -> None:
    """Weights that are kept elsewhere come to the inputs, too."""
    dropping = DroppedInputs(0.5)
    dropping.mask = torch.tensor([0.0, 2.0])
    assert dropping(torch.ones(3, 2, device="meta", dtype=torch.bfloat16)).device.type == "meta"


def test_a_mask_goes_to_its_device_once() -> None:
    """A device without numbers stands for a GPU."""
    dropping = DroppedInputs(0.5)
    dropping.mask = torch.ones(4)
    dropping(torch.empty(2, 4, device="meta", dtype=torch.bfloat16))
    assert dropping.mask.device.type == "meta"
    assert dropping.mask.dtype == torch.float32, "its numbers are rounded anew for inputs of each type"
