"""Nothing is computed that nobody reads: every forward of real runs, seen from inside the policy, against the rules of GRPO."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.experiment import make_experiment, records

from grpo_cli.engine.generation import Generation, generate
from grpo_cli.engine.run import run
from grpo_cli.engine.step import GradientPass, StepGradient
from grpo_cli.policy import shared_prefix
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.recipe.load import load_recipe
from grpo_cli.types import PolicyLogps, Segment, TokenStats, TrainingGroup

Sample = tuple[tuple[int, ...], tuple[int, ...]]

REMAINDER = """

def remainder(completions, **_):
    return [float(len(text) % 3) for text in completions]
"""


@dataclass
class Spy:
    """What a run computed, by kind of pass, and what it had to read.

    Attributes:
        forwards: Prompt and completion of every sequence that went through a model.
        steps: What each gradient was asked of: the groups, and their log-probabilities.
        truth: Log-probability of each sampled token under the weights that sampled, by another way of computing.
    """

    forwards: dict[str, Counter[Sample]] = field(default_factory=dict)
    steps: list[tuple[Sequence[TrainingGroup], Sequence[PolicyLogps]]] = field(default_factory=list)
    truth: dict[Sample, torch.Tensor] = field(default_factory=dict)

    def reset(self) -> None:
        self.forwards = {kind: Counter() for kind in ("gradient", "old", "reference")}


def samples(group: TrainingGroup, *, zero_advantages: bool) -> list[Sample]:
    """The completions of a group that matter, by the rules: not masked, and with an advantage if only that counts."""
    return [
        (group.prompt_ids, ids)
        for ids, in_loss, advantage in zip(group.completion_ids, group.in_loss, group.advantages.tolist(), strict=True)
        if in_loss and (zero_advantages or advantage != 0)
    ]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    watched = Spy()
    forward, accumulate = PolicyModel.forward, GradientPass.accumulate

    def watched_forward(self: PolicyModel, segments: tuple[Segment, ...], **arguments: Any) -> TokenStats:
        trained = next(self.parameters()).requires_grad
        kind = ("gradient" if torch.is_grad_enabled() else "old") if trained else "reference"
        if watched.forwards:
            watched.forwards[kind].update((one.prompt_ids, ids) for one in segments for ids in one.completion_ids)
        return forward(self, segments, **arguments)

    def watched_accumulate(
        self: GradientPass, policy: Any, groups: Sequence[TrainingGroup], logps: Sequence[PolicyLogps]
    ) -> StepGradient:
        watched.steps.append((groups, logps))
        return accumulate(self, policy, groups, logps)

    def watched_generate(stages: Any, *arguments: Any) -> Generation:
        if not watched.forwards:  # the checks before the first step look at the model too
            watched.reset()
        generation = generate(stages, *arguments)
        model = stages.policy.model
        for group in (group for step in generation.window.groups for group in step):
            for ids in group.completion_ids:
                with torch.no_grad():
                    logits = model(torch.tensor([group.prompt_ids + ids])).logits[0, len(group.prompt_ids) - 1 : -1]
                logps = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
                watched.truth[group.prompt_ids, ids] = logps
        return generation

    monkeypatch.setattr(PolicyModel, "forward", watched_forward)
    monkeypatch.setattr(GradientPass, "accumulate", watched_accumulate)
    monkeypatch.setattr("grpo_cli.engine.trainer.generate", watched_generate)
    return watched


@pytest.mark.parametrize("beta", [0.0, 0.05], ids=["plain", "kl"])
@pytest.mark.parametrize(("steps", "iterations"), [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_every_forward_is_needed_and_old_log_probabilities_are_those_of_the_weights_that_sampled(
    steps: int, iterations: int, beta: float, spy: Spy, tiny_model_folder: Path, tmp_path: Path
) -> None:
    """One generation: rewards that are often equal, so advantages of 0, and some truncated completions, which are masked."""
    experiment = make_experiment(
        tmp_path,
        tiny_model_folder,
        rewards={"reward_funcs": ["my_rewards.remainder"]},
        grpo={
            "num_generations": 4, "steps_per_generation": steps, "num_iterations": iterations, "beta": beta,
            "mask_truncated_completions": True,
        },
        generation={"max_completion_length": 20, "stop": ["a", "e", "i", "o", "u", "n", "t", "s", "0", "1", "2", "3"]},
        train={"max_steps": steps * iterations, "prompts_per_step": 4, "micro_batch_tokens": 64},
    )  # fmt: skip
    module = experiment.folder / "my_rewards.py"
    module.write_text(module.read_text() + REMAINDER)
    run(load_recipe(experiment.recipe))

    kl = beta != 0
    groups = [group for step, _ in spy.steps[:steps] for group in step]
    first = len(spy.steps[0][0])
    everything = sum(len(group.completion_ids) for group in groups)
    active = [samples(group, zero_advantages=kl) for group in groups]
    assert 0 < sum(map(len, active)) < everything
    assert len(spy.steps) == steps * iterations

    assert spy.forwards["gradient"] == Counter(sample for samples_ in active for sample in samples_ * iterations)
    assert spy.forwards["old"] == Counter(sample for samples_ in active[first:] for sample in samples_)
    assert spy.forwards["reference"] == Counter(sample for samples_ in active if kl for sample in samples_)

    for number, (step_groups, logps) in enumerate(spy.steps):
        for group, entry in zip(step_groups, logps, strict=True):
            assert (entry.reference is not None) == kl
            assert (entry.old is None) == (number == 0)
            read = samples(group, zero_advantages=kl)
            for ids, values in zip(group.completion_ids, entry.old or (), strict=entry.old is not None):
                sample = (group.prompt_ids, ids)
                expected = spy.truth[sample] if sample in read else torch.zeros(len(ids))
                torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)


def test_a_reference_computes_as_its_policy_does(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step they are the same, also where a kernel turned out to be wrong at the start."""

    def wrong(query: torch.Tensor, *_rest: Any) -> torch.Tensor:
        return torch.zeros_like(query)

    monkeypatch.setattr(shared_prefix, "two_part_attention", wrong)
    experiment = make_experiment(tmp_path, tiny_model_folder, grpo={"beta": 0.1}, train={"max_steps": 1})
    run(load_recipe(experiment.recipe))
    (record,) = (one for one in records(experiment.output()) if "kl" in one)
    assert abs(record["kl"]) < 1e-6
