"""Every family and every way of computing, against the model's own padded call: statistics and each parameter's gradient."""

from functools import partial
from pathlib import Path

import pytest
import torch
from padded_calls import (
    GROUP,
    PROMPT,
    SAMPLING,
    SEGMENTS,
    Attention,
    adapt,
    assert_same_as_padded_call,
    assert_same_gradients,
    gradients,
    in_parts,
    load,
    padded_call,
    whole,
)
from tiny_models import FAMILIES, build_tiny_model

from grpo_cli.errors import ModelError
from grpo_cli.policy.checkpointing import Checkpointing, set_checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.router import router_coefficient


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("tied", "attention", "checkpointing", "adapted"),
    [
        (True, "sdpa", False, False),
        (False, "sdpa", "selective", False),
        (True, "eager", True, False),
        (True, "sdpa", "selective", True),
        (False, "eager", False, True),
    ],
)
def test_a_packed_row_gives_the_statistics_and_gradients_of_the_padded_call(
    family: str, *, tied: bool, attention: Attention, checkpointing: Checkpointing, adapted: bool, tmp_path: Path
) -> None:
    model = load(build_tiny_model(tmp_path, family, tied=tied), attention)
    if adapted:
        model = adapt(model, family)
    assert_same_as_padded_call(model, partial(whole, segments=SEGMENTS), SEGMENTS, checkpointing)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("attention", "checkpointing", "adapted"),
    [
        ("sdpa", False, False),
        ("sdpa", "selective", False),
        ("sdpa", True, False),
        ("eager", False, False),
        ("sdpa", "selective", True),
        ("eager", True, True),
    ],
)
def test_a_prompt_fed_once_for_parts_of_its_group_gives_the_gradient_of_the_whole(
    family: str, *, attention: Attention, checkpointing: Checkpointing, adapted: bool, tmp_path: Path
) -> None:
    model = load(build_tiny_model(tmp_path, family), attention)
    if adapted:
        model = adapt(model, family)
    assert_same_as_padded_call(model, in_parts, (GROUP,), checkpointing)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("checkpointing", [False, "selective", True])
def test_the_router_loss_is_that_of_the_padded_call(
    *, shared: bool, checkpointing: Checkpointing, tmp_path: Path
) -> None:
    model = load(build_tiny_model(tmp_path, "qwen3_moe"))
    logps, _, outputs = padded_call(model, SEGMENTS, output_router_logits=True)
    torch.autograd.backward(logps.sum() + outputs.aux_loss)
    expected_loss, expected = outputs.aux_loss.detach(), gradients(model)
    model.zero_grad()

    policy = PolicyModel(model, sampling=SAMPLING)
    if shared:
        policy.share_prefix()
    set_checkpointing(policy.model, checkpointing)
    stats = policy(SEGMENTS, routers=True)
    assert stats.routers is not None
    (stats.logps.sum() + stats.routers.loss).backward()
    torch.testing.assert_close(stats.routers.loss.detach(), expected_loss, rtol=1e-5, atol=0)
    assert_same_gradients(model, expected)


def test_the_router_loss_has_the_models_own_weight_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    mixture = load(build_tiny_model(tmp_path / "moe", "qwen3_moe", router_aux_loss_coef=0.02))
    dense = load(build_tiny_model(tmp_path / "dense"))
    assert router_coefficient(mixture, None) == 0.02
    assert router_coefficient(mixture, 0.5) == 0.5
    assert router_coefficient(mixture, 0.0) == 0.0
    assert router_coefficient(dense, None) == router_coefficient(dense, 0.0) == 0.0
    with pytest.raises(
        ModelError, match=r"grpo\.router_aux_loss_coef: found 0\.5, but LlamaForCausalLM gives no router"
    ):
        router_coefficient(dense, 0.5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_generation_is_the_same_with_and_without_the_shared_prefix(family: str, tmp_path: Path) -> None:
    model = load(build_tiny_model(tmp_path, family)).eval()
    prompt = torch.tensor([PROMPT])
    generated = model.generate(prompt, max_new_tokens=6, do_sample=False)
    PolicyModel(model, sampling=SAMPLING).share_prefix()
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), generated)
