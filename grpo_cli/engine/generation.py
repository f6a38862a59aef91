"""The first half of the line: prompts, rollouts, rewards, advantages, as one rollout window."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from grpo_cli.engine.clock import Clock
from grpo_cli.engine.rewards import failed_too_often, failure_metrics
from grpo_cli.engine.stages import LoopSettings, Stages
from grpo_cli.engine.state import RunState
from grpo_cli.engine.window import RolloutWindow, by_step, training_groups
from grpo_cli.errors import RewardError, TrainingError
from grpo_cli.metrics import Metrics, merge
from grpo_cli.objective.advantages import advantages, reward_metrics
from grpo_cli.policy.adapter_dropout import dropped_inputs
from grpo_cli.scoring.runtime import Scores
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.telemetry.names import find
from grpo_cli.telemetry.rollouts import rollout_metrics
from grpo_cli.types import PolicyLogps, PolicyVersion, Prompt, ScoredGroup, TrainingGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One generation: what the optimizer needs of it, and what is told about it.

    Attributes:
        window: The training groups by optimizer step.
        scored: The groups as sampled and scored.
        advantages: float32 [G] of each group.
        metrics: Lengths, rewards, and whatever the reward functions logged.
        tokens: Prompt and completion tokens of all sequences.
    """

    window: RolloutWindow
    scored: tuple[ScoredGroup, ...]
    advantages: tuple[Tensor, ...]
    metrics: Metrics
    tokens: int


def prompts_to_draw(state: RunState, settings: LoopSettings) -> int:
    """Count the prompts of the next generation: a full window, or what is left of the run."""
    full = settings.prompts_per_step * settings.steps_per_generation
    if settings.total_prompts is not None:
        return min(full, settings.total_prompts - state.prompts_drawn)
    if settings.num_iterations == 1:
        return min(full, settings.prompts_per_step * (settings.total_steps - state.step))
    return full


def trainer_state(stages: Stages, settings: LoopSettings, state: RunState) -> TrainerState:
    """Tell reward functions where the run is."""
    return TrainerState(
        global_step=state.step,
        max_steps=settings.total_steps,
        epoch=stages.prompts.epoch,
        progress=state.step / settings.total_steps,
        recent_rewards=stages.reward_memory.recent(),
    )


def generate(stages: Stages, settings: LoopSettings, state: RunState, clock: Clock) -> Generation:
    """Draw prompts, complete and score them, and compute everything that is fixed for the window.

    Raises:
        TrainingError: If every prompt was dropped, or the rollout engine fails.
    """
    prompts = _draw(stages, prompts_to_draw(state, settings))
    version = PolicyVersion(state.step)
    now = trainer_state(stages, settings, state)
    with clock.phase("sync"):
        stages.weight_sync.bring(version)
    with clock.phase("generate"):
        groups = stages.weight_sync.sample(
            version,
            prompts,
            stages.sampling,
            num_generations=settings.num_generations,
            seed_key=(settings.seed, "train", state.step),
            on_group=partial(stages.scorer.start, trainer_state=now),
        )
        stages.weight_sync.rest()
    with clock.phase("score"):
        scores = stages.scorer.score(groups, now)
    check_logged(scores.logged)
    for problem in scores.problems:
        stages.recorder.warn("rewards/failed", problem)
    _check_failures(scores, settings, step=state.step + 1)
    stages.reward_memory.observe(scores.groups)
    for warning in stages.health.observe(scores.groups):
        stages.recorder.warn(warning.key, warning.message)

    rewards = [one.rewards for one in scores.groups]
    values = advantages(rewards, stages.advantage_settings)
    trained = training_groups(scores.groups, values, mask_truncated=settings.mask_truncated_completions)
    with clock.phase("forward_backward"):
        logps = _window_logps(stages, settings, trained, step=state.step)
    tokens = sum(len(group.prompt.ids) + len(one.ids) for group in groups for one in group.completions)
    metrics = merge(
        [
            stages.weight_sync.take_metrics(),
            rollout_metrics(scores.groups),
            reward_metrics(rewards, stages.scorer.names, stages.advantage_settings),
            scores.metrics,
            failure_metrics(scores),
        ]
    )
    return Generation(
        window=RolloutWindow(
            groups=by_step(trained, settings.prompts_per_step),
            logps=by_step(logps, settings.prompts_per_step),
            iterations=settings.num_iterations,
        ),
        scored=scores.groups,
        advantages=tuple(values),
        metrics=metrics,
        tokens=tokens,
    )


def _check_failures(scores: Scores, settings: LoopSettings, *, step: int) -> None:
    """Check that reward functions failed on no more prompts than they may.

    Raises:
        TrainingError: If they did.
    """
    if not failed_too_often(scores, settings.failure_budget):
        return
    failed, prompts = scores.failed_prompts, len(scores.groups)
    on = "every prompt" if failed == prompts else f"{failed} of {prompts} prompts"
    allowed = (
        "" if failed == prompts else f"; `rewards.failure_budget` allows less than {settings.failure_budget:g} of them"
    )
    raise TrainingError(
        f"step {step}: a reward function failed on {on}{allowed}",
        hint="; ".join([*scores.problems[:1], "rewards.failure_budget says on how many prompts they may fail"]),
    )


def _draw(stages: Stages, count: int) -> list[Prompt]:
    """Draw prompts, and tell about rows that were left out on the way; those of a stream are met only now."""
    before = dict(stages.prompts.rejected)
    prompts = stages.prompts.take(count)
    for reason, rows in stages.prompts.rejected.items():
        for _ in range(rows - before.get(reason, 0)):
            stages.recorder.warn(f"data/{reason}", f"dataset: a row was left out: {reason}")
    return prompts


def check_logged(names: Iterable[str]) -> None:
    """Check that reward functions logged nothing under a name that the run's own metrics have.

    Raises:
        RewardError: If one did.
    """
    for name in sorted(names):
        if find(name) is not None:
            raise RewardError(f"log_metric: {name!r} is a metric of the run itself", hint="log it under another name")


def _window_logps(
    stages: Stages, settings: LoopSettings, groups: Sequence[TrainingGroup], *, step: int
) -> list[PolicyLogps]:
    """Compute what must be known of these weights before they move, `step` steps into the run.

    That is the old log-probabilities of all optimizer steps but the first, whose own forward gives them, and those of the
    reference if there is one.
    """
    first, later = groups[: settings.prompts_per_step], groups[settings.prompts_per_step :]
    with dropped_inputs(stages.policy.model, settings.seed, step):
        old = [*(None for _ in first), *stages.gradients.logps(stages.prepared, later)]
    reference: Sequence[tuple[Tensor, ...] | None] = [None] * len(groups)
    if stages.reference is not None:
        with stages.reference.in_place():
            reference = stages.gradients.logps(stages.reference.prepared, groups)
    return [PolicyLogps(old=mine, reference=theirs) for mine, theirs in zip(old, reference, strict=True)]
