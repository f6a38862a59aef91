"""A micro-batch without memory: the pass is repeated with smaller ones, and the outcome is that of having begun with them."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.step import GradientPass
from grpo_cli.engine.strategies.replicas import Replicas
from grpo_cli.engine.token_budget import TokenBudget
from grpo_cli.errors import TrainingError
from grpo_cli.metrics import results
from grpo_cli.objective.loss import ObjectiveSettings
from grpo_cli.objective.settings import LossType
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.types import PolicyLogps, Sampling, Segment, TokenStats, TrainingGroup

CPU = torch.device("cpu")
SAMPLING = Sampling(stop_ids=(257,), max_tokens=8)


class SmallMemory(PolicyModel):
    """A policy whose forward or backward fails above a number of tokens, and which remembers how often.

    Args:
        folder: Of the model.
        most: Tokens that fit.
        fails: `forward`, `backward`, or `look`: only forwards without gradient fail.
    """

    def __init__(self, folder: Path, *, most: int, fails: str) -> None:
        super().__init__(AutoModelForCausalLM.from_pretrained(folder), sampling=SAMPLING)
        self.most = most
        self.fails = fails
        self.failures = 0
        self.held: list[weakref.ref[torch.Tensor]] = []

    def forward(self, segments: tuple[Segment, ...], **arguments: Any) -> TokenStats:
        assert all(reference() is None for reference in self.held), "the failed attempt is still in memory"
        stats = super().forward(segments, **arguments)
        if stats.tokens_computed <= self.most:
            return stats
        if self.fails == "forward" or (self.fails == "look" and not torch.is_grad_enabled()):
            activations = stats.logps * 2
            self.held.append(weakref.ref(activations))
            self._fail()
        if self.fails == "backward" and torch.is_grad_enabled():
            stats.logps.register_hook(lambda _: self._fail())  # type: ignore[no-untyped-call]
        return stats

    def _fail(self) -> None:
        self.failures += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture
def groups(make_group: Callable[..., TrainingGroup]) -> list[TrainingGroup]:
    return [
        make_group(3, 5, 4, 7, uid="0:0"),
        make_group(2, 2, 6, 4, uid="0:1", prompt_length=9, in_loss=(True, False, True, True)),
    ]


def gradient_pass(budget: int, told: list[str], *, shares_prefix: bool = False, **settings: Any) -> GradientPass:
    processes = Processes(bf16=False)
    return GradientPass(
        processes=processes,
        strategy=Replicas(processes),
        settings=ObjectiveSettings(loss_type=LossType.DAPO, epsilon_high=0.2, max_completion_length=8, **settings),
        budget=TokenBudget(budget, asked=None, device=CPU, say=told.append),
        shares_prefix=shares_prefix,
    )


@pytest.mark.parametrize("shares_prefix", [False, True])
@pytest.mark.parametrize(
    ("fails", "settings"),
    [("forward", {}), ("backward", {}), ("look", {"top_entropy_quantile": 0.5})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_gradient_is_that_of_a_run_that_began_with_the_lower_budget(
    fails: str, settings: dict[str, float], shares_prefix: bool, groups: list[TrainingGroup], tiny_model_folder: Path
) -> None:
    def outcome(budget: int, most: int) -> tuple[Any, dict[str, torch.Tensor], GradientPass, list[str]]:
        told: list[str] = []
        policy = SmallMemory(tiny_model_folder, most=most, fails=fails)
        if shares_prefix:
            policy.share_prefix()
        step = gradient_pass(budget, told, shares_prefix=shares_prefix, **settings)
        found = step.accumulate(policy, groups, [PolicyLogps() for _ in groups])
        assert policy.failures == len(told)
        named = {name: value.grad for name, value in policy.named_parameters() if value.grad is not None}
        return found, named, step, told

    found, lowered, step, told = outcome(budget=4000, most=26)
    assert len(told) >= 1
    assert step.budget.tokens < 4000
    assert f"they have {step.budget.tokens:,} at most" in told[-1]
    expected, straight, again, silence = outcome(budget=step.budget.tokens, most=26)
    assert not silence
    assert again.budget.tokens == step.budget.tokens
    assert lowered.keys() == straight.keys()
    assert all(torch.equal(value, straight[name]) for name, value in lowered.items())
    assert results(found.metrics) == results(expected.metrics)
    _, whole, _, _ = outcome(budget=4000, most=4000)
    assert any(not torch.equal(value, whole[name]) for name, value in lowered.items()), "this split rounds differently"


def test_experts_are_balanced_over_the_whole_step_also_after_running_out_of_memory(
    groups: list[TrainingGroup], tmp_path: Path
) -> None:
    """A step that fitted into one micro-batch needs no pass to count tokens beforehand; cut into several, it does."""
    folder = build_tiny_model(tmp_path, "qwen3_moe")

    def gradients(budget: int) -> dict[str, torch.Tensor]:
        policy = SmallMemory(folder, most=60, fails="backward")
        step = gradient_pass(budget, [], router_aux_loss_coef=0.5)
        step.accumulate(policy, groups, [PolicyLogps() for _ in groups])
        assert policy.failures == (budget == 4000)
        return {name: value.grad for name, value in policy.named_parameters() if value.grad is not None}

    lowered, straight = gradients(4000), gradients(60)
    assert lowered.keys() == straight.keys()
    for name, value in lowered.items():
        torch.testing.assert_close(value, straight[name], rtol=1e-4, atol=1e-6)


def test_a_pass_that_only_looks_is_repeated_too(groups: list[TrainingGroup], tiny_model_folder: Path) -> None:
    told: list[str] = []
    step = gradient_pass(4000, told)
    policy = SmallMemory(tiny_model_folder, most=30, fails="look")
    found = step.logps(policy, groups)
    expected = gradient_pass(step.budget.tokens, told).logps(policy, groups)
    assert policy.failures == len(told) > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_the_first_lowering_already_splits_the_micro_batch_that_failed(
    groups: list[TrainingGroup], tiny_model_folder: Path
) -> None:
    """Seven completions of 14 padded tokens, far below the budget."""
    told: list[str] = []
    step = gradient_pass(1_000_000, told)
    step.logps(SmallMemory(tiny_model_folder, most=97, fails="look"), groups)
    assert step.budget.tokens == 7 * 14 // 2
    assert told == [
        "out of memory with a micro-batch of 98 tokens: from here on they have 49 at most (train.micro_batch_tokens)"
    ]


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_completion_that_does_not_fit_alone_ends_the_run(
    fails: str, groups: list[TrainingGroup], tiny_model_folder: Path
) -> None:
    told: list[str] = []
    policy = SmallMemory(tiny_model_folder, most=8, fails=fails)
    with pytest.raises(TrainingError, match="out of memory on cpu: a single completion, about 9 tokens") as caught:
        gradient_pass(4000, told).accumulate(policy, groups, [PolicyLogps() for _ in groups])
    for key in ("train.gradient_checkpointing", "generation.max_completion_length", "train.bf16"):
        assert key in str(caught.value)
    assert told
    assert caught.value.__context__ is None


def test_other_errors_are_not_about_memory(
    groups: list[TrainingGroup], tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(SmallMemory, "_fail", broken)
    step = gradient_pass(4000, [])
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        step.logps(SmallMemory(tiny_model_folder, most=8, fails="look"), groups)
    assert step.budget.tokens == 4000


def test_a_micro_batch_is_measured_as_it_is_split(make_group: Callable[..., TrainingGroup]) -> None:
    """Whatever the budget is, no micro-batch of several completions is larger; and one is exactly as large as a budget that holds it."""
    from grpo_cli.engine.batching import micro_batch_size, micro_batches

    groups = [make_group(3, 5, 4, 7), make_group(2, 9, uid="0:1", prompt_length=11)]
    for shared in (False, True):

        def batches(budget: int, shared: bool = shared) -> list[Any]:
            entries = [PolicyLogps() for _ in groups]
            return micro_batches(groups, entries, micro_batch_tokens=budget, shares_prefix=shared, device=CPU)

        (whole,) = batches(10_000)
        size = micro_batch_size(whole, shares_prefix=shared)
        assert len(batches(size)) == 1
        assert len(batches(size - 1)) == 2


@pytest.mark.parametrize(
    ("asked", "device", "sharing", "expected"),
    [(None, "cpu", 1, 300), (500, "cpu", 1, 2048), (None, "cuda", 1, 2048), (None, "cpu", 8, 2048)],
    ids=["as before", "the recipe asks", "another device", "more processes"],
)
def test_a_lowered_budget_is_resumed_unless_recipe_or_device_changed(
    asked: int | None, device: str, sharing: int, expected: int
) -> None:
    lowered = TokenBudget(300, asked=None, device=CPU, say=print).state_dict()
    budget = TokenBudget(2048, asked=asked, device=torch.device(device), say=print, sharing=sharing)
    budget.load_state_dict(lowered)
    assert budget.tokens == expected
    assert budget.automatic == (asked is None)


def test_gradients_of_before_do_not_count(groups: list[TrainingGroup], tiny_model_folder: Path) -> None:
    policy = SmallMemory(tiny_model_folder, most=4000, fails="forward")
    step = gradient_pass(4000, [])
    entries = [PolicyLogps() for _ in groups]

    def gradients() -> list[torch.Tensor]:
        step.accumulate(policy, groups, entries)
        return [value.grad.clone() for value in policy.parameters() if value.grad is not None]

    assert all(map(torch.equal, gradients(), gradients()))
    idle = [replace(group, in_loss=(False,) * 4) for group in groups]
    step.accumulate(policy, idle, entries)
    assert not any(value.grad.any() for value in policy.parameters() if value.grad is not None)
