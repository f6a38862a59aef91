"""Attention to both parts with the GPU's flash kernel: what it is given, and what is made of what it gives.

Without a GPU the kernel's two operations are computed by their definition (see `flash_operations`); with one, by themselves.
"""

from pathlib import Path

import pytest
import torch
from dispatched import Dispatched
from flash_operations import BACKWARD, FORWARD, flash_by_definition
from padded_calls import COMPLETIONS, PROMPT, SAMPLING, SEGMENTS, backward, distance, gradients, load, whole
from tiny_models import build_tiny_model
from torch import Tensor

from grpo_cli import flash
from grpo_cli.flash import has_kernel, takes
from grpo_cli.policy.checkpointing import Checkpointing, set_checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.layout import completions_row, packed_row
from grpo_cli.policy.shared_prefix import PackedRow
from grpo_cli.policy.split_prompt import SplitPrompt
from grpo_cli.policy.two_part_flash import two_part_flash_attention
from grpo_cli.types import Segment

SCALING = 0.3
ROWS = {
    "one group": packed_row((Segment(prompt_ids=PROMPT, completion_ids=COMPLETIONS),)),
    "groups": packed_row(SEGMENTS),
    "prompts alone": packed_row((Segment(prompt_ids=PROMPT, completion_ids=((1,),)),) * 2),
    "a part of a group": completions_row(Segment(prompt_ids=PROMPT, completion_ids=COMPLETIONS)),
}


def attend_by_mask(query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
    """Attention with one mask for the whole row, which is written down token by token."""
    mask = torch.zeros(query.shape[2], key.shape[2], dtype=torch.bool)
    for prefix in row.prefixes:
        if not row.keys_before:
            for place in range(prefix.length):
                mask[prefix.start + place, prefix.start : prefix.start + place + 1] = True
        for start, length in prefix.completions:
            for place in range(start, start + length):
                mask[place - row.keys_before, prefix.start : prefix.start + prefix.length] = True
                mask[place - row.keys_before, start : place + 1] = True
    keys, values = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
    scores = (query @ keys.transpose(2, 3) * SCALING).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ values


def states_and_gradient(row: str, heads: int, size: int) -> tuple[PackedRow, list[Tensor], Tensor]:
    layout = ROWS[row]
    continues = None
    if row == "a part of a group":
        continues = SplitPrompt(PROMPT)
    packed = PackedRow(layout.prefixes, torch.device("cpu"), continues=continues)
    torch.manual_seed(0)
    queries = layout.ids.numel()
    shapes = (heads, queries), (2, queries + packed.keys_before), (2, queries + packed.keys_before)
    states = [torch.randn(1, *shape, size, dtype=torch.float64) for shape in shapes]
    return packed, states, torch.randn(1, heads, queries, size, dtype=torch.float64)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("row", ROWS)
def test_both_parts_are_one_attention_in_value_and_gradient(row: str, heads: int) -> None:
    packed, states, gradient = states_and_gradient(row, heads, 8)
    expected, found = ([one.clone().requires_grad_() for one in states] for _ in range(2))
    exact = attend_by_mask(expected[0], expected[1], expected[2], packed)
    torch.autograd.backward(exact, gradient)
    with flash_by_definition():
        outcome = two_part_flash_attention(found[0], found[1], found[2], packed.sequences, SCALING)
        torch.autograd.backward(outcome, gradient)
    torch.testing.assert_close(outcome, exact)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.skipif(not has_kernel(torch.device("cuda", 0)), reason="needs a GPU with the flash kernel")
@pytest.mark.parametrize("row", ROWS)
def test_the_kernel_itself_gives_what_its_definition_says(row: str) -> None:
    packed, states, gradient = states_and_gradient(row, 6, 64)
    exact = [one.bfloat16().double().requires_grad_() for one in states]
    torch.autograd.backward(attend_by_mask(exact[0], exact[1], exact[2], packed), gradient.bfloat16().double())
    found = [one.to("cuda", torch.bfloat16).requires_grad_() for one in states]
    on_device = PackedRow(packed.prefixes, torch.device("cuda", 0), continues=packed.continues)
    outcome = two_part_flash_attention(found[0], found[1], found[2], on_device.sequences, SCALING)
    torch.autograd.backward(outcome, gradient.to("cuda", torch.bfloat16))
    for mine, other in zip(found, exact, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert (mine.grad.double().cpu() - other.grad).norm() <= 0.02 * other.grad.norm()


@pytest.mark.parametrize(
    ("dtype", "size", "taken"),
    [
        (torch.bfloat16, 64, True),
        (torch.float16, 256, True),
        (torch.float32, 64, False),
        (torch.bfloat16, 20, False),
        (torch.bfloat16, 264, False),
    ],
)
def test_the_kernel_is_called_for_what_it_computes(
    dtype: torch.dtype, size: int, *, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "has_kernel", lambda _device: True)
    assert takes(torch.empty(1, 2, 3, size, dtype=dtype)) is taken


@pytest.mark.parametrize("checkpointing", [False, "selective", True])
def test_a_layer_of_a_model_is_two_calls_without_copies_of_keys(checkpointing: Checkpointing, tmp_path: Path) -> None:
    model = load(build_tiny_model(tmp_path, num_layers=2, initializer_range=0.1), dtype="bfloat16")
    set_checkpointing(model, checkpointing)
    policy = PolicyModel(model, sampling=SAMPLING)
    policy.share_prefix()
    weights = torch.linspace(1, 2, sum(len(ids) for one in SEGMENTS for ids in one.completion_ids))
    expected, _ = whole(policy, weights, SEGMENTS)
    expected_gradients = gradients(model)
    model.zero_grad()

    with flash_by_definition():
        with Dispatched() as forward:
            logps = policy(SEGMENTS).logps
        with Dispatched() as computed:
            backward(logps, weights)
    layers, fed = model.config.num_hidden_layers, ROWS["groups"].ids.numel()
    for query, key, value, *_ in forward.named(FORWARD)[::2]:
        assert query.shape[:2] == (fed, model.config.num_attention_heads)
        assert key.shape == value.shape == (fed, model.config.num_key_value_heads, query.shape[-1])
    assert len(forward.named(FORWARD)) == len(computed.named(BACKWARD)) == 2 * layers
    assert len(computed.named(FORWARD)) == (2 * layers if checkpointing is True else 0)
    assert (logps - expected).norm() <= 0.02 * expected.norm()
    assert distance(gradients(model), expected_gradients) <= 0.05
