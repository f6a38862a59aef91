"""The first half of the line: prompts, rollouts, rewards, advantages, as one rollout window."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_cli.engine.clock import Clock
from grpo_cli.engine.collecting import brought
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.handing_out import handed_out
from grpo_cli.engine.health import Signs
from grpo_cli.engine.rewarding import Drawn, Rewarded
from grpo_cli.engine.rewards import failed_too_often, failure_metrics
from grpo_cli.engine.stages import LoopSettings, Stages
from grpo_cli.engine.state import RunState
from grpo_cli.engine.window import RolloutWindow, by_step, new_window, training_groups
from grpo_cli.errors import DataError, TrainingError
from grpo_cli.metrics import Metrics, merge
from grpo_cli.objective.advantages import advantages, reward_metrics
from grpo_cli.policy.adapter_dropout import dropped_inputs
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.telemetry.records import Rollouts
from grpo_cli.telemetry.rollouts import rollout_metrics
from grpo_cli.types import Group, PolicyLogps, PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One generation: what the optimizer needs of it, and what is told about it.

    Attributes:
        window: This process's share of the training groups, by optimizer step.
        rollouts: The groups that are recorded, in the main process.
        metrics: Lengths, rewards, and whatever the reward functions logged.
        prompts: That were completed, by all processes.
        tokens: Prompt and completion tokens of all sequences.
    """

    window: RolloutWindow
    rollouts: Rollouts
    metrics: Metrics
    prompts: int
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

    Of all this a process has its part, besides some numbers; only what the main one scores or records comes together there.

    Raises:
        DataError: If a row cannot be read.
        TrainingError: If every prompt was dropped, or the rollout engine fails.
    """
    drawn = _draw(stages, prompts_to_draw(state, settings), state.step)
    version = PolicyVersion(state.step)
    now = trainer_state(stages, settings, state)
    with clock.phase("sync"):
        stages.weight_sync.bring(version)
    with stages.rewarding.randomness(state.step):
        with clock.phase("generate"):
            groups = _sample(stages, settings, drawn, version, now)
            stages.weight_sync.rest()
        with clock.phase("score"):
            rewarded = stages.rewarding.score(groups, drawn, now)
    scored = rewarded.own.groups
    failed, tokens = _totals(stages, rewarded)
    for problem in rewarded.own.problems:
        stages.recorder.warn("rewards/failed", problem)
    _check_failures(failed, drawn.count, rewarded.own.problems, settings, step=state.step + 1)
    _observe(stages, rewarded)

    rewards = [one.rewards for one in scored]
    values = advantages(rewards, stages.advantage_settings, stages.processes.sum)
    metrics = [
        rollout_metrics(scored),
        reward_metrics(rewards, stages.scorer.names, stages.advantage_settings, stages.processes.sum),
        rewarded.own.metrics,
        failure_metrics(rewarded.own),
    ]
    trained = training_groups(scored, values, mask_truncated=settings.mask_truncated_completions)
    held = new_window(
        by_step(trained, rewarded.places, count=drawn.count, prompts_per_step=settings.prompts_per_step),
        iterations=settings.num_iterations,
        policy_version=version,
    )
    window = handed_out(held, stages.gradients)
    with clock.phase("forward_backward"):
        window = _with_logps(stages, settings, window)
    return Generation(
        window=window,
        rollouts=recorded_rollouts(rewarded, values, stages.processes),
        # How the engine's weights are is the main process's to tell.
        metrics=merge([stages.weight_sync.take_metrics(), stages.processes.merge(merge(metrics))]),
        prompts=drawn.count,
        tokens=tokens,
    )


def _draw(stages: Stages, count: int, step: int) -> Drawn:
    """Draw prompts, and tell about rows that were left out on the way; those of a stream are met only now.

    Raises:
        DataError: In every process, if a row that one of them wants cannot be read.
    """
    before = dict(stages.prompts.rejected)
    places = stages.rewarding.wanted(count, step=step)
    taken, failure = [], None
    try:
        taken = stages.prompts.take(count, places)
    except DataError as error:
        failure = error
    stages.processes.raise_together(failure, DataError)
    prompts = dict(zip(places, taken, strict=True))
    for reason, rows in stages.prompts.rejected.items():
        for _ in range(rows - before.get(reason, 0)):
            stages.recorder.warn(f"data/{reason}", f"dataset: a row was left out: {reason}")
    return Drawn(count=count, prompts=prompts)


def _sample(
    stages: Stages, settings: LoopSettings, drawn: Drawn, version: PolicyVersion, now: TrainerState
) -> list[Group]:
    """Let this process's engine sample its part, and give the groups that no other process keeps."""
    asked, kept = stages.division.asked(drawn.count), stages.division.kept(drawn.count)
    early = {drawn.prompts[place].uid for place in stages.rewarding.early(drawn.count) if place in asked}

    def begin_to_score(group: Group) -> None:
        if group.prompt.uid in early:
            stages.scorer.start(group, now)

    groups = stages.weight_sync.sample(
        version,
        drawn.at(asked),
        stages.sampling,
        num_generations=settings.num_generations,
        seed_key=(settings.seed, "train", version),
        on_group=begin_to_score,
    )
    return groups[kept.start - asked.start : kept.stop - asked.start]


def _totals(stages: Stages, rewarded: Rewarded) -> tuple[int, int]:
    """Count the prompts of all processes on which reward functions failed, and the tokens of their sequences."""
    tokens = sum(
        len(one.group.prompt.ids) + len(completion.ids)
        for one in rewarded.own.groups
        for completion in one.group.completions
    )
    failed, tokens = stages.processes.sum(torch.tensor([rewarded.own.failed_prompts, tokens])).tolist()
    return failed, tokens


def _check_failures(failed: int, prompts: int, problems: Sequence[str], settings: LoopSettings, *, step: int) -> None:
    """Check that reward functions failed on no more prompts than they may.

    Raises:
        TrainingError: If they did.
    """
    if not failed_too_often(failed, prompts, settings.failure_budget):
        return
    on = "every prompt" if failed == prompts else f"{failed} of {prompts} prompts"
    allowed = (
        "" if failed == prompts else f"; `rewards.failure_budget` allows less than {settings.failure_budget:g} of them"
    )
    raise TrainingError(
        f"step {step}: a reward function failed on {on}{allowed}",
        hint="; ".join([*problems[:1], "rewards.failure_budget says on how many prompts they may fail"]),
    )


def _observe(stages: Stages, rewarded: Rewarded) -> None:
    """Remember how the groups of all processes were rewarded, and warn if nothing can be learned of them."""
    scored, total = rewarded.own.groups, stages.processes.sum
    stages.reward_memory.observe(total(stages.reward_memory.sums(scored)))
    signs = Signs.of(scored)
    truncated, unscored, equal = total(
        torch.tensor([not signs.truncated, not signs.unscored, not signs.equal], dtype=torch.int64)
    ).tolist()
    for warning in stages.health.observe(Signs(truncated=not truncated, unscored=not unscored, equal=not equal)):
        stages.recorder.warn(warning.key, warning.message)


def recorded_rollouts(rewarded: Rewarded, own: Sequence[Tensor], processes: Processes) -> Rollouts:
    """Put the advantages of the groups that are recorded beside them, in the main process.

    Args:
        rewarded: Their rewards.
        own: The advantages of this process's groups, float32 [G] each.
        processes: The processes of this run.
    """
    values = torch.cat([torch.empty(0), *own[: rewarded.recorded_here]])
    told = brought(values.numpy().tobytes(), rewarded.holders, processes)
    sizes = [len(one.rewards) for one in rewarded.recorded]
    everyones = torch.frombuffer(bytearray(b"".join(told)), dtype=torch.float32) if any(told) else torch.empty(0)
    return Rollouts(scored=rewarded.recorded, advantages=torch.split(everyones, sizes) if sizes else ())


def _with_logps(stages: Stages, settings: LoopSettings, window: RolloutWindow) -> RolloutWindow:
    """Compute what must be known of these weights before they move.

    That is the old log-probabilities of all optimizer steps but the first, whose own forward gives them, and those of the
    reference if there is one.
    """
    gradients = stages.gradients
    later = [group for step in window.groups[1:] for group in step]
    old: list[tuple[Tensor, ...] | None] = [None] * len(window.groups[0])
    if len(window.groups) > 1:
        with dropped_inputs(stages.policy.model, settings.seed, window.policy_version):
            old += gradients.logps(stages.prepared, later)
    groups = [group for step in window.groups for group in step]
    reference: Sequence[tuple[Tensor, ...] | None] = [None] * len(groups)
    if stages.reference is not None:
        with stages.reference.in_place():
            reference = gradients.logps(stages.reference.prepared, groups)
    entries = iter(
        (group, PolicyLogps(old=mine, reference=theirs))
        for group, mine, theirs in zip(groups, old, reference, strict=True)
    )
    return window.of_entries([[next(entries) for _ in step] for step in window.groups])
