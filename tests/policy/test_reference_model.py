"""The reference model: frozen, and moved only by its own rule."""

import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.reference import ReferenceModel
from grpo_cli.types import Sampling


def policy_of(folder: Path) -> PolicyModel:
    return PolicyModel(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        sampling=Sampling(stop_ids=(257,), max_tokens=8),
    )


def as_it_is(policy: PolicyModel) -> PolicyModel:
    return policy


def test_the_mix_is_the_weighted_sum_at_its_steps_only(tiny_model_folder: Path) -> None:
    policy = policy_of(tiny_model_folder)
    reference = ReferenceModel(copy.deepcopy(policy), prepare=as_it_is, mixup_alpha=0.25, sync_steps=3)
    before = [parameter.clone() for parameter in reference.policy.parameters()]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    for step in (1, 2):
        reference.mix_if_due(policy, step, parts=PolicyModel.parameters)
        assert all(torch.equal(a, b) for a, b in zip(reference.policy.parameters(), before, strict=True))
    reference.mix_if_due(policy, 3, parts=PolicyModel.parameters)
    for after, old, new in zip(reference.policy.parameters(), before, policy.parameters(), strict=True):
        torch.testing.assert_close(after, 0.25 * new + 0.75 * old)


def test_a_reference_takes_no_gradient_and_does_not_move_by_default(tiny_model_folder: Path) -> None:
    policy = policy_of(tiny_model_folder)
    reference = ReferenceModel(copy.deepcopy(policy), prepare=as_it_is)
    assert not any(parameter.requires_grad for parameter in reference.policy.parameters())
    assert not reference.moves
