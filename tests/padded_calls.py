"""One group of completions, and ways to compute its statistics and gradients: the model's own padded call, and the policy's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model

from grpo_cli.policy.checkpointing import Checkpointing, set_checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_model
from grpo_cli.policy.split_prompt import SplitPrompt
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.types import Sampling, Segment

SAMPLING = Sampling(stop_ids=(257,), max_tokens=16)
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)
"""Longer than the windows of the tiny models."""
COMPLETIONS = ((20, 21, 22, 23), (24,), (25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 257), (35, 36))
GROUP = Segment(prompt_ids=PROMPT, completion_ids=COMPLETIONS)
SEGMENTS = (
    GROUP,
    Segment(prompt_ids=(40,), completion_ids=((41, 42, 43),)),
)
Attention = Literal["sdpa", "eager"]
Precision = Literal["float32", "bfloat16"]
Way = Callable[[PolicyModel, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Statistics of some segments, and a backward of their log-probabilities weighted by the second argument."""


def load(folder: Path, attention: Attention = "sdpa", dtype: Precision = "float32") -> Any:
    return load_model(ModelSection(name_or_path=str(folder), attn_implementation=attention, dtype=dtype), folder=folder)


def adapt(model: Any, family: str) -> Any:
    """Give a model adapters that change what it says."""
    torch.manual_seed(0)
    # PEFT warns of a pattern of its own for all linear layers of this mixture of experts.
    targets = ["q_proj", "v_proj"] if family == "qwen3_moe" else "all-linear"
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=targets)).train()


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


def backward(logps: torch.Tensor, weights: torch.Tensor) -> None:
    torch.autograd.backward((logps * weights).sum())


def whole(
    policy: PolicyModel, weights: torch.Tensor, segments: tuple[Segment, ...] = (GROUP,)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics and backward in one forward."""
    stats = policy(segments)
    backward(stats.logps, weights)
    return stats.logps.detach(), stats.entropies.detach()


def in_parts(policy: PolicyModel, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of `GROUP` in three forwards; the second one feeds no token at all."""
    prompt = SplitPrompt(PROMPT)
    fed, logps, entropies = 0, [], []
    for part in (COMPLETIONS[:1], COMPLETIONS[1:2], COMPLETIONS[2:]):
        stats = policy((Segment(prompt_ids=PROMPT, completion_ids=part),), prompt=prompt)
        share, weights = weights[: len(stats.logps)], weights[len(stats.logps) :]
        backward(stats.logps, share)
        fed += stats.tokens_computed
        logps.append(stats.logps.detach())
        entropies.append(stats.entropies.detach())
    loss = prompt.loss()
    assert loss is not None
    torch.autograd.backward(loss)
    assert fed == len(PROMPT) + sum(len(ids) - 1 for ids in COMPLETIONS)
    return torch.cat(logps), torch.cat(entropies)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative, over all parameters."""
    assert found.keys() == expected.keys()
    missed, present = (
        torch.cat([(found[name].float() * sign - value).flatten() for name, value in expected.items()]).norm()
        for sign in (1, 0)
    )
    return float(missed / present)


def assert_same_gradients(model: Any, expected: dict[str, torch.Tensor]) -> None:
    """Relative 1e-4 of each parameter's gradient."""
    found = gradients(model)
    assert found.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        # Some gradients are 0 in exact arithmetic, such as that of a bias on keys.
        assert (found[name] - value).norm() <= 1e-4 * value.norm() + 1e-7 * largest, name


def assert_same_as_padded_call(
    model: Any, way: Way, segments: tuple[Segment, ...], checkpointing: Checkpointing
) -> None:
    """What a way of computing with shared prompts says of these segments is what the padded call says, gradients included."""
    expected_logps, expected_entropies, _ = padded_call(model, segments)
    weights = torch.linspace(-1, 1, len(expected_logps))
    backward(expected_logps, weights)
    expected = gradients(model)
    model.zero_grad()

    policy = PolicyModel(model, sampling=SAMPLING)
    policy.share_prefix()
    set_checkpointing(model, checkpointing)
    logps, entropies = way(policy, weights)
    torch.testing.assert_close(logps, expected_logps.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropies, expected_entropies.detach(), rtol=1e-4, atol=1e-4)
    assert_same_gradients(model, expected)
