"""The check that a rollout engine with a copy of the weights samples from the trainer's.

Versions and checksums show that what arrived is what was sent. They do not show that it went to the right places: a wrong name, or
a tied matrix that one of its two users keeps an old copy of, changes what is sampled and nothing else. Log-probabilities show it.
"""

from dataclasses import replace

import torch
from torch import nn

from grpo_cli.engine.division import Division
from grpo_cli.engine.randomness import own_randomness
from grpo_cli.engine.step import GradientPass
from grpo_cli.errors import TrainingError
from grpo_cli.metrics import Max, Mean, Metrics
from grpo_cli.rollout.engine import RolloutEngine
from grpo_cli.types import Group, PolicyVersion, Prompt, PromptId, Sampling, TrainingGroup

COMPLETIONS = 4
TOKENS = 32
"""Of each completion of the probe: enough to tell other weights from rounding."""

_MARGIN = 20
_LEAST = 5e-4
"""Weights that are one step old differ by more even at a learning rate of 1e-6 (0.002 nats on a model of 135M parameters)."""


def rounding(*dtypes: str) -> float:
    """Mean difference of log-probabilities, nats, that rounding makes at most.

    Args:
        dtypes: What engine and trainer compute in, such as `float32`.
    """
    return 0.005 if set(dtypes) == {"float32"} else 0.1


class Canary:
    """Lets the engine sample a fixed probe, and compares its log-probabilities of those tokens with the trainer's.

    It leaves training's randomness alone, and rewards see nothing of it.

    Args:
        rollouts: The engine.
        division: Which process samples what.
        gradients: Computes the trainer's log-probabilities.
        policy: The prepared policy.
        prompt: The probe.
        sampling: How training completions are drawn.
        tolerance: Largest mean difference, nats; None: `rounding` at first, and then twenty times the first difference, if that is less.
        rounding: From `rounding`.
        every: Syncs between two checks; 0 checks the first only.
        first: Syncs at the beginning that are all checked. Fresh adapters change nothing, so that only the second sync shows whether they
            are there.
        seed: The run's seed.
    """

    def __init__(
        self,
        *,
        rollouts: RolloutEngine,
        division: Division,
        gradients: GradientPass,
        policy: nn.Module,
        prompt: Prompt,
        sampling: Sampling,
        tolerance: float | None,
        rounding: float,
        every: int,
        first: int = 1,
        seed: int,
    ) -> None:
        self._rollouts = rollouts
        self._division = division
        self._gradients = gradients
        self._policy = policy
        self._prompt = prompt
        # As training samples, for the trainer's log-probabilities are of that distribution; but without what only the engine knows of.
        length = min(TOKENS, sampling.max_tokens)
        self._sampling = replace(
            sampling, min_tokens=min(sampling.min_tokens, length), max_tokens=length, stop_strings=(), regex=None
        )
        self._adapts = tolerance is None
        self._tolerance = rounding if tolerance is None else tolerance
        self._every = every
        self._first = first
        self._seed = seed
        self._syncs = 0

    def after_sync(self, version: PolicyVersion, *, in_any_case: bool = False) -> Metrics:
        """Check if a check is due.

        Args:
            version: Of the weights that the engine was given.
            in_any_case: Check also if none is due.

        Returns:
            The differences; empty if none is due.

        Raises:
            TrainingError: If the engine samples from other weights than the policy's.
        """
        due = self._syncs < self._first or (self._every > 0 and self._syncs % self._every == 0)
        metrics = self._check(version) if due or in_any_case else {}
        self._syncs += 1
        return metrics

    def _check(self, version: PolicyVersion) -> Metrics:
        processes, copies = self._gradients.processes, self._rollouts.weight_copies
        asked, kept = self._division.asked(copies), self._division.kept(copies)
        with own_randomness(self._seed):
            with processes.autocast():
                groups = self._rollouts.generate(
                    [replace(self._prompt, uid=PromptId(f"canary:{copy}")) for copy in asked],
                    self._sampling,
                    num_generations=COMPLETIONS,
                    seed_key=(self._seed, "canary"),
                )[kept.start - asked.start : kept.stop - asked.start]
            current = self._gradients.logps(self._policy, [_training_group(group) for group in groups])
        by_copy = [
            (torch.cat([completion.logps for completion in group.completions]) - torch.cat(ours)).abs()
            for group, ours in zip(groups, current, strict=True)
        ]
        own = [[copy.sum().item(), copy.numel(), copy.mean().item(), copy.max().item()] for copy in by_copy]
        sums, counts, means, maxima = processes.everyones(torch.tensor(own, dtype=torch.float64).view(-1, 4)).unbind(1)
        # The worst of the copies: NaN, too, is no agreement.
        mean, largest = means.max().item(), maxima.max().item()
        if not mean <= self._tolerance:
            raise TrainingError(
                f"the rollout engine does not sample from the trained weights: with those of step {version} its log-probabilities "
                f"of {round(counts[0].item())} tokens differ from the trainer's by {mean:.3g} on average and "
                f"{largest:.3g} at most; {self._tolerance:g} on average is allowed (vllm.canary_tolerance)",
                hint="a large difference: the weights did not reach it, or under wrong names, or another vLLM version loads them "
                "otherwise; restart the server and go on with --resume. A small one: engine and trainer round differently "
                "(vllm.dtype, train.bf16); raise vllm.canary_tolerance if sampling/logp_difference/mean was as large before",
            )
        if self._adapts:
            self._adapts = False
            self._tolerance = min(self._tolerance, max(_MARGIN * mean, _LEAST))
        return {
            "canary/logp_difference/mean": Mean(sums.sum().item(), counts.sum().item()),
            "canary/logp_difference/max": Max(largest),
        }


def _training_group(group: Group) -> TrainingGroup:
    """Make a group of which every completion is computed."""
    completions = group.completions
    return TrainingGroup(
        uid=group.prompt.uid,
        prompt_ids=group.prompt.ids,
        completion_ids=tuple(completion.ids for completion in completions),
        behaviour_logps=tuple(completion.logps for completion in completions),
        advantages=torch.ones(len(completions)),
        in_loss=(True,) * len(completions),
        images=group.prompt.images,
    )
