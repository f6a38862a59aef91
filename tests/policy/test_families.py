"""Every family and every way of computing, against the model's own padded call: statistics and each parameter's gradient."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, build_tiny_model

from grpo_cli.errors import ModelError
from grpo_cli.policy.checkpointing import Checkpointing, set_checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_model
from grpo_cli.policy.router import router_coefficient
from grpo_cli.policy.split_prompt import SplitPrompt
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.types import Sampling, Segment

SAMPLING = Sampling(stop_ids=(257,), max_tokens=16)
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)
"""Longer than the windows of the tiny models."""
COMPLETIONS = ((20, 21, 22, 23), (24,), (25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 257), (35, 36))
SEGMENTS = (
    Segment(prompt_ids=PROMPT, completion_ids=COMPLETIONS),
    Segment(prompt_ids=(40,), completion_ids=((41, 42, 43),)),
)
Attention = Literal["sdpa", "eager"]


def load(folder: Path, attention: Attention = "sdpa") -> Any:
    return load_model(ModelSection(name_or_path=str(folder), attn_implementation=attention), folder=folder)


def padded_call(model: Any, segments: tuple[Segment, ...], **options: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Log-probabilities and entropies of the completions by definition, from one call on rows padded on the left."""
    pairs = [(segment.prompt_ids, ids) for segment in segments for ids in segment.completion_ids]
    width = max(len(prompt) + len(ids) for prompt, ids in pairs) - 1
    rows = torch.zeros(len(pairs), width, dtype=torch.long)
    mask = torch.zeros_like(rows)
    for row, (prompt, ids) in enumerate(pairs):
        fed = (prompt + ids)[:-1]
        rows[row, width - len(fed) :] = torch.tensor(fed)
        mask[row, width - len(fed) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    outputs = model(input_ids=rows, attention_mask=mask, position_ids=positions, use_cache=False, **options)
    logps, entropies = [], []
    for row, (_, ids) in enumerate(pairs):
        distribution = outputs.logits[row, -len(ids) :].log_softmax(-1)
        logps.append(distribution[torch.arange(len(ids)), torch.tensor(ids)])
        entropies.append(torch.special.entr(distribution.exp()).sum(-1))
    return torch.cat(logps), torch.cat(entropies), outputs


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_same_gradients(model: Any, expected: dict[str, torch.Tensor]) -> None:
    """Relative 1e-4 of each parameter's gradient."""
    found = gradients(model)
    assert found.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        # Some gradients are 0 in exact arithmetic, such as that of a bias on keys.
        assert (found[name] - value).norm() <= 1e-4 * value.norm() + 1e-7 * largest, name


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
        torch.manual_seed(0)
        # PEFT warns of a pattern of its own for all linear layers of this mixture of experts.
        targets = ["q_proj", "v_proj"] if family == "qwen3_moe" else "all-linear"
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=targets)).train()
    expected_logps, expected_entropies, _ = padded_call(model, SEGMENTS)
    weights = torch.linspace(-1, 1, len(expected_logps))
    torch.autograd.backward((expected_logps * weights).sum())
    expected = gradients(model)
    model.zero_grad()

    policy = PolicyModel(model, sampling=SAMPLING)
    policy.share_prefix()
    set_checkpointing(policy.model, checkpointing)
    stats = policy(SEGMENTS)
    (stats.logps * weights).sum().backward()
    torch.testing.assert_close(stats.logps, expected_logps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stats.entropies, expected_entropies, rtol=1e-4, atol=1e-4)
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, "selective", True])
def test_a_prompt_fed_once_for_parts_of_its_group_gives_the_gradient_of_the_whole(
    family: str, checkpointing: Checkpointing, tmp_path: Path
) -> None:
    model = load(build_tiny_model(tmp_path, family))
    expected_logps, expected_entropies, _ = padded_call(model, SEGMENTS[:1])
    weights = torch.linspace(-1, 1, len(expected_logps))
    torch.autograd.backward((expected_logps * weights).sum())
    expected = gradients(model)
    model.zero_grad()

    policy = PolicyModel(model, sampling=SAMPLING)
    policy.share_prefix()
    set_checkpointing(policy.model, checkpointing)
    prompt = SplitPrompt(PROMPT)
    done, fed, logps, entropies = 0, 0, [], []
    for part in (COMPLETIONS[:1], COMPLETIONS[1:2], COMPLETIONS[2:]):  # the second one feeds no token at all
        stats = policy((Segment(prompt_ids=PROMPT, completion_ids=part),), prompt=prompt)
        (stats.logps * weights[done : done + len(stats.logps)]).sum().backward()
        done, fed = done + len(stats.logps), fed + stats.tokens_computed
        logps.append(stats.logps)
        entropies.append(stats.entropies)
    loss = prompt.loss()
    assert loss is not None
    torch.autograd.backward(loss)
    assert fed == len(PROMPT) + sum(len(ids) - 1 for ids in COMPLETIONS)
    torch.testing.assert_close(torch.cat(logps), expected_logps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(entropies), expected_entropies, rtol=1e-4, atol=1e-4)
    assert_same_gradients(model, expected)


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
    stats = policy(SEGMENTS, router_loss=True)
    assert stats.router_loss is not None
    (stats.logps.sum() + stats.router_loss).backward()
    torch.testing.assert_close(stats.router_loss.detach(), expected_loss, rtol=1e-5, atol=0)
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
