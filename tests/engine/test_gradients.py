"""The step on a real model: the gradient is that of the whole step, however it is split; the ratio is exactly 1 where it must be."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.step import GradientPass
from grpo_cli.engine.strategies.replicas import Replicas
from grpo_cli.engine.token_budget import TokenBudget
from grpo_cli.metrics import results
from grpo_cli.objective.loss import ObjectiveSettings
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.settings import LossType
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import disable_dropout
from grpo_cli.recipe.schema.grpo import LossType as RecipeLossType
from grpo_cli.types import PolicyLogps, Sampling, TrainingGroup

SAMPLING = Sampling(stop_ids=(257,), max_tokens=8)


@pytest.fixture
def groups(make_group: Callable[..., TrainingGroup]) -> list[TrainingGroup]:
    return [
        make_group(3, 5, 1, 7, uid="0:0"),
        make_group(2, 2, 6, 4, uid="0:1", prompt_length=9, in_loss=(True, False, True, True)),
        make_group(8, 1, 1, 2, uid="0:2", prompt_length=1),
    ]


def settings_of(loss_type: str, **changes: Any) -> ObjectiveSettings:
    level = RatioLevel.SEQUENCE if loss_type == "luspo" else RatioLevel.TOKEN
    ceiling = 2.0 if loss_type == "cispo" else 0.2
    values = {"importance_sampling_level": level, "epsilon_high": ceiling, "max_completion_length": 8, **changes}
    return ObjectiveSettings(loss_type=LossType(loss_type), **values)


def drifted(groups: Sequence[TrainingGroup]) -> list[PolicyLogps]:
    """Old and reference log-probabilities that differ from the policy's."""
    return [
        PolicyLogps(
            old=tuple(-5.0 - values for values in group.behaviour_logps),
            reference=tuple(-5.5 + values for values in group.behaviour_logps),
        )
        for group in groups
    ]


def gradient_pass(settings: ObjectiveSettings, budget: int, *, shared: bool = False) -> GradientPass:
    tokens = TokenBudget(budget, asked=budget, device=torch.device("cpu"), say=print)
    processes = Processes(bf16=False)
    return GradientPass(
        processes=processes, strategy=Replicas(processes), settings=settings, budget=tokens, shares_prefix=shared
    )


def gradient(
    model: Any,
    groups: Sequence[TrainingGroup],
    logps: Sequence[PolicyLogps],
    settings: ObjectiveSettings,
    budget: int,
    *,
    shared: bool = False,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    step = gradient_pass(settings, budget, shared=shared)
    policy = PolicyModel(model, sampling=SAMPLING)
    if shared:
        policy.share_prefix()
    metrics = results(step.accumulate(policy, groups, logps).metrics)
    named = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return named, metrics


@pytest.mark.parametrize("loss_type", get_args(RecipeLossType))
@pytest.mark.parametrize(
    "changes",
    [{"beta": 0.1}, {"entropy_coef": 0.05, "top_entropy_quantile": 0.4}, {"off_policy_mask_threshold": 0.05}],
    ids=["kl", "entropy", "off-policy"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["padded", "shared"])
def test_gradient_and_metrics_do_not_depend_on_the_token_budget(
    loss_type: str, changes: dict[str, float], shared: bool, groups: list[TrainingGroup], tiny_model_folder: Path
) -> None:
    """With a shared prefix, small budgets cut groups into parts: their prompts are fed once all the same."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float64)
    settings = settings_of(loss_type, **changes)
    logps = drifted(groups)
    whole, whole_metrics = gradient(model, groups, logps, settings, budget=10_000, shared=shared)
    assert max(value.abs().max() for value in whole.values()) > 0
    for budget in (1, 20, 45):
        split, split_metrics = gradient(model, groups, logps, settings, budget, shared=shared)
        for name, expected in whole.items():
            torch.testing.assert_close(split[name], expected, rtol=1e-4, atol=1e-6, msg=name)
        for name in whole_metrics:
            if shared or name != "tokens/computed":
                assert split_metrics[name] == pytest.approx(whole_metrics[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("budget", [10_000, 30, 8])
def test_the_load_balancing_loss_is_that_of_the_whole_step_however_it_is_split(
    budget: int, groups: list[TrainingGroup], tmp_path: Path
) -> None:
    """It is over all tokens, those of completions that are out of the policy term included, and no mean over micro-batches."""
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, "qwen3_moe"))
    settings, logps = settings_of("dapo"), drifted(groups)
    without, _ = gradient(model, groups, logps, settings, budget, shared=True)
    balanced = replace(settings, router_aux_loss_coef=0.1)
    found, metrics = gradient(model, groups, logps, balanced, budget, shared=True)
    assert metrics["tokens/skipped"] == 0

    rows = [group.prompt_ids + ids[:-1] for group in groups for ids in group.completion_ids]
    mask = torch.tensor([[int(place < len(row)) for place in range(max(map(len, rows)))] for row in rows])
    padded = torch.tensor([[*row, *[0] * (mask.shape[1] - len(row))] for row in rows])
    model.zero_grad()
    expected = model(padded, attention_mask=mask, output_router_logits=True).aux_loss
    torch.autograd.backward(expected)
    assert metrics["aux_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, value in model.named_parameters():
        if value.grad is not None and name in found:
            torch.testing.assert_close(found[name] - without[name], 0.1 * value.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("loss_type", get_args(RecipeLossType))
def test_the_ratio_is_exactly_one_on_the_first_pass_dropout_and_adapters_included(
    loss_type: str, groups: list[TrainingGroup], tmp_path: Path
) -> None:
    """Without old log-probabilities nothing is clipped, and what a second forward gives is the same to the last bit."""
    base = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, attention_dropout=0.3))
    model = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.3, init_lora_weights=False))
    disable_dropout(model)
    model.train()
    settings = settings_of(loss_type)
    step = gradient_pass(settings, 10_000)
    policy = PolicyModel(model, sampling=SAMPLING)
    recomputed = [PolicyLogps(old=old) for old in step.logps(policy, groups)]
    absent = [PolicyLogps() for _ in groups]
    implicit, metrics = gradient(model, groups, absent, settings, budget=10_000)
    explicit, again = gradient(model, groups, recomputed, settings, budget=10_000)
    assert all(torch.equal(value, explicit[name]) for name, value in implicit.items())
    assert metrics["loss"] == again["loss"]
    assert all(value == 0 for name, value in metrics.items() if name.startswith("clip_ratio/"))
    if loss_type == "vespo":
        assert metrics["vespo/phi_seq_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize("changes", [{}, {"beta": 0.1}], ids=["plain", "kl"])
def test_log_probabilities_come_back_in_their_places_from_both_passes(
    changes: dict[str, float], groups: list[TrainingGroup], tiny_model_folder: Path
) -> None:
    """Zeros stand for what adds nothing: the completion out of the loss, and an advantage of 0 unless a KL term reads it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    policy = PolicyModel(model, sampling=SAMPLING)
    groups[2].advantages[3] = 0.0
    step = gradient_pass(settings_of("dapo", **changes), 25)
    entries = drifted(groups) if changes else [PolicyLogps() for _ in groups]
    looked, trained = step.logps(policy, groups), step.accumulate(policy, groups, entries).logps()
    zeros = 0
    for group, *passes in zip(groups, looked, trained, strict=True):
        for index, (ids, *found) in enumerate(zip(group.completion_ids, *passes, strict=True)):
            logits = model(torch.tensor([group.prompt_ids + ids])).logits[0, len(group.prompt_ids) - 1 : -1]
            expected = logits.detach().log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
            if not group.in_loss[index] or (not changes and group.advantages[index] == 0):
                expected = torch.zeros(len(ids))
                zeros += 1
            for values in found:
                assert not values.requires_grad
                torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
    assert zeros == (1 if changes else 2)


def test_a_dropped_group_counts_nowhere(groups: list[TrainingGroup], tiny_model_folder: Path) -> None:
    """With a KL term and an entropy bonus, every completion that is there would have a gradient."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    settings = settings_of("grpo", beta=0.1, entropy_coef=0.1)
    gone = replace(groups[1], completion_ids=(), behaviour_logps=(), in_loss=(), advantages=groups[1].advantages[:0])
    empty = PolicyLogps(old=(), reference=())
    first, _, last = drifted(groups)
    with_it, _ = gradient(model, [groups[0], gone, groups[2]], [first, empty, last], settings, budget=10_000)
    without, _ = gradient(model, [groups[0], groups[2]], [first, last], settings, budget=10_000)
    assert all(torch.equal(value, without[name]) for name, value in with_it.items())
    nothing, metrics = gradient(model, [gone], [PolicyLogps()], settings, budget=100)
    assert nothing
    assert not any(value.any() for value in nothing.values())
    assert metrics["loss"] == metrics["tokens/computed"] == 0


@pytest.mark.parametrize("loss_type", get_args(RecipeLossType))
@pytest.mark.parametrize(
    ("changes", "skips"),
    [({}, True), ({"off_policy_mask_threshold": 0.05}, True), ({"beta": 0.1}, False), ({"entropy_coef": 0.1}, False)],
    ids=["plain", "off-policy", "kl", "entropy"],
)
def test_what_is_left_out_has_no_gradient(
    loss_type: str,
    changes: dict[str, float],
    skips: bool,
    groups: list[TrainingGroup],
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group without signal and a single completion of advantage 0, once left out and once computed."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float64)
    flat = [replace(groups[0], advantages=torch.zeros(4)), groups[1], groups[2]]
    flat[2].advantages[1] = 0.0
    settings, logps = settings_of(loss_type, **changes), drifted(groups)
    found, metrics = gradient(model, flat, logps, settings, budget=10_000)
    masked = 2  # the completion of groups[1] that is not in the loss
    assert metrics["tokens/skipped"] == masked + (3 + 5 + 1 + 7 + 1 if skips else 0)
    monkeypatch.setattr(
        "grpo_cli.engine.step.active_completions", lambda group, **_: list(range(len(group.completion_ids)))
    )
    expected, everything = gradient(model, flat, logps, settings, budget=10_000)
    assert everything["tokens/skipped"] == 0
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert metrics["loss"] == pytest.approx(everything["loss"], rel=1e-5, abs=1e-7)


def test_a_step_of_masked_completions_only_has_a_gradient_of_zero(
    make_group: Callable[..., TrainingGroup], tiny_model_folder: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    masked = [make_group(3, 4, in_loss=(False, False))]
    named, metrics = gradient(model, masked, [PolicyLogps()], settings_of("dapo"), budget=100)
    assert all(bool((value == 0).all()) for value in named.values())
    assert metrics["loss"] == 0
