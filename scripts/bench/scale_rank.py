"""One rank of many, alone in a process: its part of a step around the model, with what the others would send there already.

It is the code that trains. The messages of the other ranks are made beforehand, by what would make them there; when they arrive they
are written to memory, as a network would.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from bench.scale_simulation import CPU, FreePolicy, NoExchange, SimulatedProcesses
from bench.scale_step import (
    NUM_GENERATIONS,
    PROMPTS_PER_RANK,
    REWARDS,
    SAMPLING,
    MadeUpEngine,
    MadeUpScorer,
    made_up_groups,
    made_up_scores,
)
from grpo_cli.data.sampler import PromptSampler
from grpo_cli.engine.batching import active_completions, micro_batches
from grpo_cli.engine.shared_scoring import SharedScorer
from grpo_cli.engine.shares import Share, share_of
from grpo_cli.engine.spread_rollouts import SpreadRollouts
from grpo_cli.engine.step import GradientPass
from grpo_cli.engine.token_budget import TokenBudget
from grpo_cli.engine.window import training_groups
from grpo_cli.objective.advantages import AdvantageSettings, advantages, reward_metrics
from grpo_cli.objective.loss import ObjectiveSettings
from grpo_cli.objective.settings import LossType
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.telemetry.rollouts import rollout_metrics
from grpo_cli.types import Group, PolicyLogps, Prompt, TrainingGroup

MICRO_BATCH_TOKENS = 4096
NOW = TrainerState(global_step=0, max_steps=1, epoch=0.0, progress=0.0)
REWARD_SETTINGS = AdvantageSettings(weights=(1.0, 0.5))
OBJECTIVE = ObjectiveSettings(loss_type=LossType.DAPO, max_completion_length=SAMPLING.max_tokens)
RANKS_WITH_METRICS = 16
"""The metrics of so many ranks are computed; the others tell the same over again."""


class SimulatedRank:
    """The rank in the middle of many. What is named as a stage prepares the stage, and gives what is to be timed.

    Args:
        count: Number of ranks.
        sampler: Draws the prompts of this step, and of others.
    """

    def __init__(self, count: int, sampler: PromptSampler) -> None:
        self.count = count
        self.rank = count // 2
        self.sampler = sampler
        self.prompts = sampler.take(count * PROMPTS_PER_RANK)
        self.groups = made_up_groups(self.prompts)
        self.scores = made_up_scores(self.groups)
        self.trained = self._with_advantages()
        self._engine = MadeUpEngine({group.prompt.uid: group for group in self.groups})
        self._rollouts = [self._rollouts_of(rank) for rank in range(count)]
        self._rewards = self._told_rewards()
        self._metrics = [self._metrics_of(rank) for rank in range(min(count, RANKS_WITH_METRICS))]

    def draw_prompts(self) -> Callable[[], list[Prompt]]:
        """All ranks draw the prompts of all: each is a function of the seed."""
        return partial(self.sampler.take, len(self.prompts))

    def gather_completions(self) -> Callable[[], list[Group]]:
        """All ranks come to have all completions, which one rollout engine each has sampled."""
        processes = self._processes()
        if self.count > 1:
            processes.main_tells(b"0")  # copies of the weights that an engine has
        spread = SpreadRollouts(self._engine, engines=self.count, processes=processes)
        if self.count > 1:
            processes.others_agree(times=2)  # about the prompts, and that nothing failed
            processes.others_tell(self._rollouts)
        return partial(_sampled, spread, self.prompts)

    def gather_rewards(self) -> Callable[[], object]:
        """The main rank scores, and tells the others."""
        processes = self._processes()
        if self.count > 1:
            processes.main_tells(b'["accuracy", "length"]')
        scorer: Any = MadeUpScorer(self.scores) if processes.is_main else None
        shared = SharedScorer(scorer, processes)
        if self.count > 1:
            processes.main_tells(self._rewards)
        return partial(shared.score, self.groups, NOW)

    def compute_advantages(self) -> Callable[[], list[TrainingGroup]]:
        """All ranks compute all advantages, and the metrics of completions and rewards."""

        def call() -> list[TrainingGroup]:
            rollout_metrics(self.scores.groups)
            reward_metrics([one.rewards for one in self.scores.groups], REWARDS, REWARD_SETTINGS)
            return self._with_advantages()

        return call

    def pass_for_logps(self) -> Callable[[], list[tuple[torch.Tensor, ...]]]:
        """The pass that computes old or reference log-probabilities, and gathers them."""
        processes = self._processes()
        processes.others_add(torch.cat([logps for group in self.trained for logps in group.behaviour_logps]))
        return partial(_gradient_pass(processes).logps, FreePolicy(), self.trained)

    def pass_for_gradient(self) -> Callable[[], object]:
        """The pass that computes the gradient: balance, micro-batches, loss, metrics."""
        processes = self._processes()
        processes.others_tell(self._metrics_of_all())
        processes.others_tell([b"1.0"] * self.count)  # the seconds that each took
        logps = [PolicyLogps()] * len(self.trained)
        return partial(_gradient_pass(processes).accumulate, FreePolicy(), self.trained, logps)

    def balance(self) -> Callable[[], Share]:
        """Who computes what."""
        return lambda: share_of(self.rank, self.trained, _active(self.trained), count=self.count, shares_prefix=True)

    def make_micro_batches(self) -> Callable[[], object]:
        """The rank's share becomes micro-batches."""
        share = self.balance()()
        return lambda: micro_batches(
            share.computed_groups(),
            [PolicyLogps()] * len(share.computed),
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            shares_prefix=True,
            device=CPU,
        )

    def gather_metrics(self) -> Callable[[], object] | None:
        """All ranks come to have the metrics of all; None: a single one has nobody to tell."""
        if self.count == 1:
            return None
        processes = self._processes()
        processes.others_tell(self._metrics_of_all())
        own = _gradient_pass(SimulatedProcesses(rank=0, count=1)).accumulate(
            FreePolicy(), self.trained[:PROMPTS_PER_RANK], [PolicyLogps()] * PROMPTS_PER_RANK
        )
        return partial(processes.merge, own.metrics)

    def _processes(self) -> SimulatedProcesses:
        return SimulatedProcesses(rank=self.rank, count=self.count)

    def _with_advantages(self) -> list[TrainingGroup]:
        values = advantages([one.rewards for one in self.scores.groups], REWARD_SETTINGS)
        return training_groups(self.scores.groups, values, mask_truncated=False)

    def _rollouts_of(self, rank: int) -> bytes:
        """Give what a rank tells of the completions that it sampled."""
        alone = SimulatedProcesses(rank=0, count=1)
        _sampled(SpreadRollouts(self._engine, engines=1, processes=alone), self.prompts[rank :: self.count])
        return alone.told[-1]

    def _told_rewards(self) -> bytes:
        """Give what the main rank tells of the rewards."""
        alone = SimulatedProcesses(rank=0, count=1)
        scorer: Any = MadeUpScorer(self.scores)
        SharedScorer(scorer, alone).score(self.groups, NOW)
        return alone.told[-1]

    def _metrics_of(self, rank: int) -> bytes:
        """Give what a rank tells of the completions that it trained on; here these are those of its own prompts."""
        own = self.trained[rank :: self.count]
        alone = SimulatedProcesses(rank=0, count=1)
        gradient = _gradient_pass(alone).accumulate(FreePolicy(), own, [PolicyLogps()] * len(own))
        pair = SimulatedProcesses(rank=0, count=2)
        pair.others_tell([b"", b"{}"])
        pair.merge(gradient.metrics)
        return pair.told[-1]

    def _metrics_of_all(self) -> list[bytes]:
        return list(islice(cycle(self._metrics), self.count))


STAGES: dict[str, Callable[[SimulatedRank], Callable[[], object] | None]] = {
    "draw prompts": SimulatedRank.draw_prompts,
    "gather completions": SimulatedRank.gather_completions,
    "gather rewards": SimulatedRank.gather_rewards,
    "advantages": SimulatedRank.compute_advantages,
    "pass for log-probabilities": SimulatedRank.pass_for_logps,
    "pass for the gradient": SimulatedRank.pass_for_gradient,
}
"""The stages of a step around the model, in their order."""

PARTS: dict[str, Callable[[SimulatedRank], Callable[[], object] | None]] = {
    "balance": SimulatedRank.balance,
    "micro-batches": SimulatedRank.make_micro_batches,
    "gather metrics": SimulatedRank.gather_metrics,
}
"""Parts of the last of them, measured by themselves."""


def _active(groups: Sequence[TrainingGroup]) -> list[list[int]]:
    return [active_completions(group, zero_advantages_count=False) for group in groups]


def _sampled(spread: SpreadRollouts, prompts: Sequence[Prompt]) -> list[Group]:
    return spread.generate(prompts, SAMPLING, num_generations=NUM_GENERATIONS, seed_key=(0, "train", 0))


def _gradient_pass(processes: SimulatedProcesses) -> GradientPass:
    strategy: Any = NoExchange()
    return GradientPass(
        processes=processes,
        strategy=strategy,
        settings=OBJECTIVE,
        budget=TokenBudget(MICRO_BATCH_TOKENS, asked=MICRO_BATCH_TOKENS, device=CPU, say=print),
        shares_prefix=True,
    )
