"""What a backward with checkpoints computes again, by the operations that are carried out."""

from pathlib import Path

import pytest
import torch
from dispatched import Dispatched
from padded_calls import COMPLETIONS, PROMPT, SAMPLING, SEGMENTS, load
from tiny_models import build_tiny_model
from torch.multiprocessing.reductions import StorageWeakRef

from grpo_cli.policy.checkpointing import Checkpointing, set_checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.split_prompt import SplitPrompt
from grpo_cli.types import Segment

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = ("mm", "addmm", "_linear_pointwise")


def dispatched_in_backward(folder: Path, checkpointing: Checkpointing, *, shared: bool) -> Dispatched:
    model = load(build_tiny_model(folder))
    set_checkpointing(model, checkpointing)
    policy = PolicyModel(model, sampling=SAMPLING)
    if shared:
        policy.share_prefix()
    loss = policy(SEGMENTS).logps.sum()
    seen = Dispatched()
    with seen:
        loss.backward()
    return seen


@pytest.mark.parametrize("shared", [False, True])
def test_selective_checkpoints_compute_no_product_and_no_attention_again(*, shared: bool, tmp_path: Path) -> None:
    everything, selective, nothing = (
        dispatched_in_backward(tmp_path, checkpointing, shared=shared) for checkpointing in (True, "selective", False)
    )
    assert len(selective.named(*PRODUCTS)) == len(nothing.named(*PRODUCTS)) < len(everything.named(*PRODUCTS))
    assert not nothing.named(ATTENTION)
    assert not selective.named(ATTENTION)
    assert everything.named(ATTENTION)
    assert len(selective.named("silu")) == len(everything.named("silu")) > 0  # what is cheap is computed again


@pytest.mark.parametrize("checkpointing", ["selective", True])
def test_what_a_recomputation_records_of_a_prompt_changes_nothing(checkpointing: Checkpointing, tmp_path: Path) -> None:
    """Recorded states that were replaced would be kept in memory for nothing, and lead to a graph that is gone."""
    model = load(build_tiny_model(tmp_path))
    set_checkpointing(model, checkpointing)
    policy = PolicyModel(model, sampling=SAMPLING)
    policy.share_prefix()
    prompt = SplitPrompt(PROMPT)
    policy((Segment(prompt_ids=PROMPT, completion_ids=COMPLETIONS),), prompt=prompt).logps.sum().backward()
    before = prompt.leaves
    loss = prompt.loss()
    assert loss is not None
    with Dispatched() as seen:
        torch.autograd.backward(loss)
    assert seen.named("silu")
    assert all(one is other for one, other in zip(before, prompt.leaves, strict=True))


@pytest.mark.parametrize(("family", "kept"), [("llama", False), ("gemma2", True)])
def test_an_outcome_that_is_only_added_to_something_is_not_kept(family: str, kept: bool, tmp_path: Path) -> None:
    """A norm reads the outcome of the last product of a Gemma2 layer; nothing reads that of a Llama layer."""
    model = load(build_tiny_model(tmp_path, family, num_layers=4))
    set_checkpointing(model, "selective")
    policy = PolicyModel(model, sampling=SAMPLING)
    outcomes: list[StorageWeakRef] = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(
            lambda _module, _inputs, outcome: outcomes.append(StorageWeakRef(outcome.untyped_storage()))  # type: ignore[no-untyped-call]
        )
    loss = policy(SEGMENTS).logps.sum()
    assert [not outcome.expired() for outcome in outcomes[2:]] == [kept, kept]  # type: ignore[no-untyped-call]
    loss.backward()
