"""Held-out prompts: scored and measured in one way, during training and by `grpo eval`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from grpo_cli.engine.collecting import collected
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.division import Division
from grpo_cli.engine.held_out import HeldOut
from grpo_cli.engine.randomness import own_randomness
from grpo_cli.engine.rewards import failure_metrics
from grpo_cli.engine.weight_sync import WeightSync
from grpo_cli.evaluation.question import answered
from grpo_cli.metrics import merge, results
from grpo_cli.objective.advantages import AdvantageSettings, reward_metrics
from grpo_cli.recipe.eval_tasks import MEAN_REWARD
from grpo_cli.scoring.runtime import Scores
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.telemetry.completions import completion_table
from grpo_cli.telemetry.recorder import Evaluation
from grpo_cli.telemetry.rollouts import rollout_metrics
from grpo_cli.types import Group, PolicyVersion, Sampling


def scored(held_out: HeldOut, groups: Sequence[Group], trainer_state: TrainerState) -> Scores:
    """Score all completions of a dataset in one call; the rewards' state is left as it was.

    Raises:
        RewardError: As `Scorer.score` does.
    """
    kept = held_out.scorer.state_dict()
    try:
        return held_out.scorer.score(groups, trainer_state)
    finally:
        held_out.scorer.load_state_dict(kept)


def plain_numbers(held_out: HeldOut, scores: Scores) -> dict[str, float]:
    """Give what training tells of its completions, too: rewards, lengths, and whatever the reward functions logged."""
    settings = AdvantageSettings(weights=held_out.weights)
    found = merge(
        [
            rollout_metrics(scores.groups),
            reward_metrics([one.rewards for one in scores.groups], held_out.scorer.names, settings),
            scores.metrics,
            failure_metrics(scores),
        ]
    )
    return results(found)


def success_numbers(held_out: HeldOut, table: pa.Table) -> dict[str, float]:
    """Give what is counted in correct completions, as far as it can be told which these are.

    Args:
        held_out: The dataset.
        table: All of its completions, with the answers.
    """
    found = answered(held_out.sheet(table), held_out.question()).metrics
    return {name: measure.value for name, measure in found.items() if "@" in name}


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """Samples and scores the held-out prompts during training, with randomness of its own.

    Attributes:
        held_out: The datasets, all of them every time.
        samplings: How the completions of each are drawn.
        weight_sync: Samples from the newest weights.
        processes: The processes of this run; the main one scores, and tells the others the metrics.
        division: Which of them samples what.
        seed: The run's seed.
    """

    held_out: Sequence[HeldOut]
    samplings: Sequence[Sampling]
    weight_sync: WeightSync
    processes: Processes
    division: Division
    seed: int

    def run(self, trainer_state: TrainerState) -> tuple[Evaluation, Sequence[str]]:
        """Evaluate the policy's present weights; training's generators and the rewards' state are left as they were.

        Returns:
            The evaluation, with tables in the main process alone, and one line per problem with a reward function that `rewards.on_error: drop` survived.
        """
        metrics: dict[str, float] = {}
        tables: dict[str | None, pa.Table] = {}
        problems: list[str] = []
        for held_out, sampling in zip(self.held_out, self.samplings, strict=True):
            with own_randomness(self.seed):
                groups = self._sample(held_out, sampling, PolicyVersion(trainer_state.global_step))
                if not self.processes.is_main:
                    continue
                scores = scored(held_out, groups, trainer_state)
                table = completion_table(scores.groups, held_out.scorer.names, step=trainer_state.global_step)
                table = tables[held_out.task.name] = held_out.with_answers(table)
            found = plain_numbers(held_out, scores) | success_numbers(held_out, table)
            metrics |= {f"{held_out.task.prefix}{name}": value for name, value in found.items()}
            problems += scores.problems
        if self.processes.is_main:
            metrics = _with_mean_reward(metrics, self.held_out)
        told = self.processes.from_main(json.dumps(metrics).encode())
        return Evaluation(step=trainer_state.global_step, metrics=json.loads(told), tables=tables), problems

    def _sample(self, held_out: HeldOut, sampling: Sampling, version: PolicyVersion) -> list[Group]:
        """Complete the prompts of a dataset; the main process gets all groups."""
        prompts = held_out.prompts
        asked, kept = self.division.asked(len(prompts)), self.division.kept(len(prompts))
        groups = self.weight_sync.sample(
            version,
            prompts[asked.start : asked.stop],
            sampling,
            num_generations=held_out.task.settings.num_generations,
            seed_key=held_out.seed_key(self.seed),
        )
        return collected(groups[kept.start - asked.start : kept.stop - asked.start], prompts, self.processes)


def _with_mean_reward(metrics: Mapping[str, float], held_out: Sequence[HeldOut]) -> dict[str, float]:
    """Add the mean over datasets of their rewards, if they have names. NaN if one has none: it would be that of other datasets."""
    if any(one.task.name is None for one in held_out):
        return dict(metrics)
    rewards = [metrics[f"{one.task.prefix}reward"] for one in held_out]
    return {MEAN_REWARD: math.fsum(rewards) / len(rewards), **metrics}
