"""Computing in bfloat16, as the model's own precision or under autocast: no further from float32 than the model's own call."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from flash_operations import flash_by_definition
from padded_calls import (
    COMPLETIONS,
    GROUP,
    SAMPLING,
    Precision,
    backward,
    distance,
    gradients,
    in_parts,
    load,
    padded_call,
    whole,
)
from tiny_models import FAMILIES, build_tiny_model
from torch.nn.functional import scaled_dot_product_attention

from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.layout import packed_row
from grpo_cli.policy.shared_prefix import PackedRow, shared_prefix_attention
from grpo_cli.policy.split_prompt import SplitPrompt
from grpo_cli.policy.two_part import RowBlocks, two_part_attention
from grpo_cli.types import Segment

CONTEXTS: dict[str, tuple[Precision, Callable[[], AbstractContextManager[object]]]] = {
    "bfloat16": ("bfloat16", nullcontext),
    "autocast": ("float32", lambda: torch.autocast("cpu", torch.bfloat16)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", CONTEXTS)
@pytest.mark.parametrize("way", [whole, in_parts])
@pytest.mark.parametrize("attention", ["blocks", "flash", "masks"])
def test_a_packed_row_rounds_no_more_than_the_padded_call(
    family: str,
    precision: str,
    way: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    attention: str,
    tmp_path: Path,
) -> None:
    dtype, context = CONTEXTS[precision]
    # Small weights: with large ones, one rounding more changes everything that follows.
    folder = build_tiny_model(tmp_path, family, initializer_range=0.1)
    weights = torch.linspace(1, 2, sum(map(len, COMPLETIONS)))
    exact = load(folder)
    exact_logps, _, _ = padded_call(exact, (GROUP,))
    backward(exact_logps, weights)

    model = load(folder, dtype=dtype)
    with context():
        padded_logps, _, _ = padded_call(model, (GROUP,))
    backward(padded_logps, weights)
    padded_error = distance(gradients(model), gradients(exact))
    model.zero_grad()

    policy = PolicyModel(model, sampling=SAMPLING)
    policy.share_prefix()
    policy.attends_in_blocks = attention != "masks"
    with context(), flash_by_definition() if attention == "flash" else nullcontext():
        logps, _ = way(policy, weights)
    assert (logps - exact_logps).norm() <= 1.5 * (padded_logps.float() - exact_logps).norm()
    assert distance(gradients(model), gradients(exact)) <= 1.5 * padded_error


@pytest.mark.parametrize("in_blocks", [False, True])
def test_attention_computes_in_the_precision_that_torchs_own_has_under_autocast(*, in_blocks: bool) -> None:
    layout = packed_row((Segment(prompt_ids=(1, 2), completion_ids=((3, 4), (5, 6, 7))),))
    query, key, value = (torch.randn(1, 2, layout.ids.numel(), 8) for _ in range(3))
    packed = PackedRow(layout.prefixes, torch.device("cpu"), in_blocks=in_blocks)

    def attend() -> torch.Tensor:
        return shared_prefix_attention(pytest.fail, torch.nn.Module(), query, key, value, None, packed=packed)[0]

    assert attend().dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert attend().dtype == scaled_dot_product_attention(query, key, value).dtype == torch.bfloat16


def test_the_parts_of_a_prompts_gradient_are_added_up_in_float32() -> None:
    """In bfloat16 a sum of ones ends at 256: the next one is rounded away."""
    prompt = SplitPrompt((1, 2))
    states = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    prompt.record(0, states * 1, states * 1)
    prompt.close(states[0, 0, -1:] * 1)
    own = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16)
    for _ in range(300):
        key, _ = prompt.before(0, own, own)
        torch.autograd.backward(key.sum())
    loss = prompt.loss()
    assert loss is not None
    torch.autograd.backward(loss)
    assert states.grad is not None
    assert (states.grad == 300).all()


def test_two_parts_are_merged_with_no_more_than_a_rounding_of_each() -> None:
    torch.manual_seed(0)
    completions = tuple(tuple(range(40)) for _ in range(8))
    layout = packed_row((Segment(prompt_ids=tuple(range(100)), completion_ids=completions),))
    query, key, value = (torch.randn(1, heads, layout.ids.numel(), 64).bfloat16() for heads in (9, 3, 3))
    blocks = RowBlocks.of(layout.prefixes)
    exact = two_part_attention(query.double(), key.double(), value.double(), blocks, None)
    found = two_part_attention(query, key, value, blocks, None)

    def error(output: torch.Tensor) -> float:
        return float((output.double() - exact).norm() / exact.norm())

    # The kernel rounds each part, and the merged outcome is rounded: sqrt(2) at most, and its own sums are rounded too.
    assert error(found) <= 1.5 * error(exact.bfloat16())
