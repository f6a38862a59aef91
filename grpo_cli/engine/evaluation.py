"""Held-out prompts during training: on the rollout engine in use, with randomness of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_cli.engine.randomness import own_randomness
from grpo_cli.engine.shared_scoring import Scorer
from grpo_cli.engine.weight_sync import WeightSync
from grpo_cli.metrics import Sum, merge, results
from grpo_cli.objective.advantages import AdvantageSettings, reward_metrics
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.telemetry.recorder import Evaluation
from grpo_cli.telemetry.rollouts import rollout_metrics
from grpo_cli.types import PolicyVersion, Prompt, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """Samples and scores the held-out prompts.

    Attributes:
        prompts: All of them, every time.
        weight_sync: Samples from the newest weights.
        scorer: The rewards of the training run.
        sampling: How completions are drawn here.
        num_generations: Completions per prompt.
        advantage_settings: The reward weights.
        seed: The run's seed; the same samples' randomness at every evaluation, so that two of them can be compared.
    """

    prompts: Sequence[Prompt]
    weight_sync: WeightSync
    scorer: Scorer
    sampling: Sampling
    num_generations: int
    advantage_settings: AdvantageSettings
    seed: int

    def run(self, trainer_state: TrainerState) -> tuple[Evaluation, Sequence[str]]:
        """Evaluate the policy's present weights; training's generators and the rewards' state are left as they were.

        Returns:
            The evaluation, and one line per problem with a reward function that `rewards.on_error: drop` survived.
        """
        kept = self.scorer.state_dict()
        with own_randomness(self.seed):
            groups = self.weight_sync.sample(
                PolicyVersion(trainer_state.global_step),
                self.prompts,
                self.sampling,
                num_generations=self.num_generations,
                seed_key=(self.seed, "eval"),
            )
            try:
                scores = self.scorer.score(groups, trainer_state)
            finally:
                self.scorer.load_state_dict(kept)
        rewards = [one.rewards for one in scores.groups]
        metrics = merge(
            [
                rollout_metrics(scores.groups),
                reward_metrics(rewards, self.scorer.names, self.advantage_settings),
                scores.metrics,
                {"rewards/dropped_prompts": Sum(sum(one.dropped for one in scores.groups))},
            ]
        )
        evaluation = Evaluation(
            step=trainer_state.global_step,
            metrics={f"eval/{name}": value for name, value in results(metrics).items()},
            scored=scores.groups,
        )
        return evaluation, scores.problems
