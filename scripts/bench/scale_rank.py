"""One rank of many, alone in a process: its part of a step around the model, with what the others would send there already.

It is the code that trains. The messages of the other ranks are made beforehand, by what would make them there; when they arrive they
are written to memory, as a network would.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from bench.scale_simulation import CPU, FreePolicy, NoExchange, OverheardProcesses, SimulatedProcesses, overheard
from bench.scale_step import (
    NUM_GENERATIONS,
    REWARDS,
    SAMPLING,
    MadeUpEngine,
    MadeUpScorer,
    made_up_groups,
    made_up_scores,
)
from grpo_cli.data.sampler import PromptSampler
from grpo_cli.engine.collecting import collected_scores, groups_message, scores_message
from grpo_cli.engine.division import Division
from grpo_cli.engine.generation import recorded_rollouts
from grpo_cli.engine.handing_out import agreed_outline, handed_out
from grpo_cli.engine.recording import Recording
from grpo_cli.engine.rewarding import Drawn, Rewarded, RewardedByEach, RewardedByMain, recorded_among, rewards_rows
from grpo_cli.engine.spread_rollouts import SpreadRollouts
from grpo_cli.engine.step import GradientPass
from grpo_cli.engine.token_budget import TokenBudget
from grpo_cli.engine.window import RolloutWindow, new_window, training_groups
from grpo_cli.metrics import Metrics, merge
from grpo_cli.objective.advantages import AdvantageSettings, advantages, reward_metrics
from grpo_cli.objective.loss import ObjectiveSettings
from grpo_cli.objective.settings import LossType
from grpo_cli.recipe.schema import LoggingSection
from grpo_cli.scoring.runtime import Scores
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.telemetry.completions import completion_table
from grpo_cli.telemetry.rollouts import rollout_metrics
from grpo_cli.types import Group, PolicyLogps, PolicyVersion, ScoredGroup

MICRO_BATCH_TOKENS = 4096
NOW = TrainerState(global_step=0, max_steps=1, epoch=0.0, progress=0.0)
REWARD_SETTINGS = AdvantageSettings(weights=(1.0, 0.5))
OBJECTIVE = ObjectiveSettings(loss_type=LossType.DAPO, max_completion_length=SAMPLING.max_tokens)


class SimulatedStep:
    """A step of many ranks. What is named as a stage prepares the stage for one of them, and gives what is to be timed.

    Args:
        count: Number of ranks.
        sampler: Draws the prompts of this step, and of others.
        prompts_per_rank: How many each samples.

    Attributes:
        processes: The ranks as the stage that was prepared last sees them, and what they have exchanged.
    """

    def __init__(self, count: int, sampler: PromptSampler, prompts_per_rank: int) -> None:
        self.count = count
        self.processes = SimulatedProcesses(rank=0, count=count)
        self.sampler = sampler
        self.prompts = sampler.take(count * prompts_per_rank)
        self.recording = Recording(settings=LoggingSection(), steps_per_window=1, num_generations=NUM_GENERATIONS)
        self.recorded = self.recording.places(len(self.prompts), step=0)
        self.holders = self.division(0).holders(self.recorded, len(self.prompts))
        self.groups = made_up_groups(self.prompts)
        self.scored = made_up_scores(self.groups)
        self._engine = MadeUpEngine({group.prompt.uid: group for group in self.groups})
        self._completions = [groups_message(self.groups_of(rank)) for rank in range(count)]
        places = [len(self.places(rank)) for rank in range(count)]
        self._rewards = rewards_rows(self.scored, REWARDS, places)
        windows = [self.held(rank) for rank in range(count)]
        self._costs = torch.stack([_told_costs(rank, count, window) for rank, window in enumerate(windows)])
        self._cuts = self._told_cuts() if count > 1 else b""

    def division(self, rank: int) -> Division:
        """Say what a rank samples: every one has an engine."""
        return Division(rank=rank, processes=self.count, engines=self.count)

    def places(self, rank: int) -> range:
        """Give the places of its prompts."""
        return self.division(rank).kept(len(self.prompts))

    def groups_of(self, rank: int) -> list[Group]:
        """Give the groups that it samples."""
        return self.groups[self.places(rank).start : self.places(rank).stop]

    def scored_of(self, rank: int) -> Sequence[ScoredGroup]:
        """Give the same with their rewards."""
        return self.scored[self.places(rank).start : self.places(rank).stop]

    def held(self, rank: int) -> RolloutWindow:
        """Give what it has of the step before it gets its share."""
        scored = self.scored_of(rank)
        return self._window(scored, advantages([one.rewards for one in scored], REWARD_SETTINGS))

    def _window(self, scored: Sequence[ScoredGroup], values: Sequence[Tensor]) -> RolloutWindow:
        trained = training_groups(scored, values, mask_truncated=False)
        return new_window([trained], iterations=1, policy_version=PolicyVersion(0))

    def draw_prompts(self, rank: int) -> Callable[[], object]:
        """A rank builds the prompts that it samples, of all that are drawn."""
        return partial(self.sampler.take, len(self.prompts), self.places(rank))

    def agree_on_rollouts(self, rank: int) -> Callable[[], object]:
        """Around sampling: ranks make sure that they sample in the same way, and that none has failed."""
        processes = self._processes(rank)
        processes.main_tells(b"0")  # copies of the weights that an engine has
        spread = SpreadRollouts(self._engine, division=self.division(rank), processes=processes)
        prompts = [group.prompt for group in self.groups_of(rank)]
        return lambda: spread.generate(prompts, SAMPLING, num_generations=NUM_GENERATIONS, seed_key=(0, "train", 0))

    def get_rewards(self, rank: int) -> Callable[[], object]:
        """Where functions see all completions, a rank sends what it sampled to the main one, and gets the rewards."""
        processes = self._processes(rank)
        processes.main_has_for_this(self._rewards[rank])
        rewarding = RewardedByMain(
            scorer=self._scorer(self.scored_of(rank)),
            processes=processes,
            division=self.division(rank),
            recording=self.recording,
        )
        drawn = Drawn(count=len(self.prompts), prompts=dict(enumerate(self.prompts)))
        return partial(rewarding.score, self.groups_of(rank), drawn, NOW)

    def score_own(self, rank: int) -> Callable[[], object]:
        """A rank scores what it sampled; what is recorded of that it sends to the main one."""
        rewarding = RewardedByEach(
            scorer=self._scorer(self.scored_of(rank)),
            processes=self._processes(rank),
            division=self.division(rank),
            recording=self.recording,
            seed=0,
        )
        drawn = Drawn(count=len(self.prompts), prompts={place: self.prompts[place] for place in self.places(rank)})
        return partial(rewarding.score, self.groups_of(rank), drawn, NOW)

    def compute_advantages(self, rank: int) -> Callable[[], object]:
        """A rank computes the advantages of what it sampled, and metrics, for which all add up theirs; and sends what is recorded."""
        processes, scored = self._processes(rank), self.scored_of(rank)
        processes.others_are_silent(times=2)
        rewarded = self._rewarded(rank, ())

        def call() -> object:
            rewards = [one.rewards for one in scored]
            told = reward_metrics(rewards, REWARDS, REWARD_SETTINGS, processes.sum)
            values = advantages(rewards, REWARD_SETTINGS, processes.sum)
            rollouts = recorded_rollouts(rewarded, values, processes)
            return merge([rollout_metrics(scored), told]), rollouts, self._window(scored, values)

        return call

    def hand_out(self, rank: int) -> Callable[[], RolloutWindow]:
        """Ranks find out who trains on what, and send it there."""
        processes, held = self._processes(rank), self.held(rank)
        self._let_know(processes)
        if self.count > 1:
            _, senders = self._sent_by(rank)
            processes.others_send({sender: self._sent_by(sender)[0][rank] for sender in senders})
        return partial(handed_out, held, gradient_pass(processes))

    def pass_for_logps(self, rank: int) -> Callable[[], object]:
        """The pass that computes old or reference log-probabilities."""
        share = self.hand_out(rank)()
        return partial(gradient_pass(self._processes(rank)).logps, FreePolicy(), share.groups[0])

    def pass_for_gradient(self, rank: int) -> Callable[[], object]:
        """The pass that computes the gradient: totals, micro-batches, loss, metrics."""
        share = self.hand_out(rank)()
        processes = self._processes(rank)
        processes.others_are_silent(
            times=3
        )  # in the sums of the totals, of the metrics, and of the seconds that each took
        processes.know(self.metrics_of(rank))
        return partial(gradient_pass(processes).accumulate, FreePolicy(), share.groups[0], share.logps[0])

    def merge_metrics(self, rank: int) -> Callable[[], object] | None:
        """All ranks come to have the metrics of all; None: a single one has nobody to tell."""
        if self.count == 1:
            return None
        processes, metrics = self._processes(rank), self.metrics_of(rank)
        processes.know(metrics)
        return partial(processes.merge, metrics)

    def draw_all_prompts(self) -> Callable[[], object]:
        """The main rank builds all prompts, to score what was made of them."""
        return partial(self.sampler.take, len(self.prompts))

    def draw_recorded_prompts(self) -> Callable[[], object]:
        """The main rank builds the prompts whose completions are recorded."""
        return partial(self.sampler.take, len(self.prompts), self.recorded)

    def score_all(self) -> Callable[[], object]:
        """Where functions see all completions, the main rank gets them, scores them, and tells the rewards."""
        processes = self._processes(0)
        if self.count > 1:
            processes.others_send(dict(enumerate(self._completions)))
        rewarding = RewardedByMain(
            scorer=self._scorer(self.scored),
            processes=processes,
            division=self.division(0),
            recording=self.recording,
        )
        drawn = Drawn(count=len(self.prompts), prompts=dict(enumerate(self.prompts)))
        return partial(rewarding.score, self.groups_of(0), drawn, NOW)

    def cut_shares(self) -> Callable[[], object] | None:
        """The main rank finds out who trains on what, and tells all. None: a single one has everything."""
        if self.count == 1:
            return None
        processes = self._processes(0)
        self._let_know(processes)
        return partial(agreed_outline, self.held(0), gradient_pass(processes))

    def record(self) -> Callable[[], pa.Table]:
        """The main rank gets what is recorded, and makes the table that it writes."""
        processes, values = self._processes(0), advantages([one.rewards for one in self.scored], REWARD_SETTINGS)
        recorded = {rank: self.places(rank)[: self._recorded_here(rank)] for rank in self.holders}
        for told in (
            {rank: scores_message(self.scored[own.start : own.stop]) for rank, own in recorded.items()},
            {rank: torch.cat(values[own.start : own.stop]).numpy().tobytes() for rank, own in recorded.items()},
        ):
            if self.count > 1:
                processes.others_send(told)
        prompts, here = [self.prompts[place] for place in self.recorded], self._recorded_here(0)

        def call() -> pa.Table:
            scored = collected_scores(self.scored[:here], prompts, self.holders, processes)
            rollouts = recorded_rollouts(self._rewarded(0, scored), values[: len(self.places(0))], processes)
            flat = torch.cat([torch.empty(0), *rollouts.advantages]).tolist()
            return completion_table(rollouts.scored, REWARDS, step=0, advantages=flat)

        return call

    def _rewarded(self, rank: int, recorded: Sequence[ScoredGroup]) -> Rewarded:
        own = Scores(groups=tuple(self.scored_of(rank)), metrics={})
        here = self._recorded_here(rank)
        return Rewarded(places=self.places(rank), own=own, recorded_here=here, holders=self.holders, recorded=recorded)

    def _recorded_here(self, rank: int) -> int:
        return recorded_among(self.places(rank), self.recorded)

    def metrics_of(self, rank: int) -> Metrics:
        """Give what it tells of the completions that it trained on; here these are those of its own prompts."""
        groups = self.held(rank).groups[0]
        alone = gradient_pass(SimulatedProcesses(rank=0, count=1))
        return alone.accumulate(FreePolicy(), groups, [PolicyLogps()] * len(groups)).metrics

    def _let_know(self, processes: SimulatedProcesses) -> None:
        """Have there what a rank is told before completions are handed out: the main one what each costs, the others who gets it."""
        processes.others_add(torch.tensor([self._costs.numel()]))
        if processes.is_main:
            processes.others_bring(self._costs)
        else:
            processes.main_tells(self._cuts)

    def _told_cuts(self) -> bytes:
        """Give what the main rank tells all others about who trains on what."""
        processes = OverheardProcesses(rank=0, count=self.count, passing=1)
        self._let_know(processes)
        told: bytes = overheard(partial(handed_out, self.held(0), gradient_pass(processes)))
        return told

    def _sent_by(self, rank: int) -> tuple[Mapping[int, bytes], Sequence[int]]:
        """Give what a rank sends to whom when completions are handed out, and who sends it some."""
        processes = OverheardProcesses(rank=rank, count=self.count, passing=1 if rank else 2)
        self._let_know(processes)
        sent: tuple[Mapping[int, bytes], Sequence[int]]
        sent = overheard(partial(handed_out, self.held(rank), gradient_pass(processes)))
        return sent

    def _processes(self, rank: int) -> SimulatedProcesses:
        self.processes = SimulatedProcesses(rank=rank, count=self.count)
        return self.processes

    def _scorer(self, scored: Sequence[ScoredGroup]) -> Any:
        return MadeUpScorer(scored)


RANK_STAGES: dict[str, Callable[[SimulatedStep, int], Callable[[], object] | None]] = {
    "draw prompts": SimulatedStep.draw_prompts,
    "agree on rollouts": SimulatedStep.agree_on_rollouts,
    "score own completions": SimulatedStep.score_own,
    "advantages": SimulatedStep.compute_advantages,
    "hand completions out": SimulatedStep.hand_out,
    "pass for log-probabilities": SimulatedStep.pass_for_logps,
    "pass for the gradient": SimulatedStep.pass_for_gradient,
}
"""The stages of a step around the model, in their order, for any rank but the main one."""

RANK_PARTS: dict[str, Callable[[SimulatedStep, int], Callable[[], object] | None]] = {
    "merge metrics": SimulatedStep.merge_metrics,
}
"""Parts of the last of them, measured by themselves."""

REWARDED_STAGES: dict[str, Callable[[SimulatedStep, int], Callable[[], object] | None]] = {
    "get rewards": SimulatedStep.get_rewards,
}
"""What any rank does instead of scoring where functions see all completions of a step."""

MAIN_STAGES: dict[str, Callable[[SimulatedStep], Callable[[], object] | None]] = {
    "draw prompts to record": SimulatedStep.draw_recorded_prompts,
    "get and record completions": SimulatedStep.record,
    "cut shares": SimulatedStep.cut_shares,
}
"""What the main rank does besides."""

SCORING_STAGES: dict[str, Callable[[SimulatedStep], Callable[[], object] | None]] = {
    "draw all prompts": SimulatedStep.draw_all_prompts,
    "get and score all completions": SimulatedStep.score_all,
}
"""What it does besides that where functions see all completions of a step."""


def gradient_pass(processes: SimulatedProcesses) -> GradientPass:
    """Make the pass of one rank."""
    strategy: Any = NoExchange()
    return GradientPass(
        processes=processes,
        strategy=strategy,
        settings=OBJECTIVE,
        budget=TokenBudget(MICRO_BATCH_TOKENS, asked=MICRO_BATCH_TOKENS, device=CPU, say=print),
        shares_prefix=True,
    )


def _told_costs(rank: int, count: int, window: RolloutWindow) -> Tensor:
    """Give what a rank tells the main one of what it has."""
    processes = OverheardProcesses(rank=rank, count=count)
    processes.others_add(torch.tensor([sys.maxsize // 4]))  # as if it were no more than its part
    told: Tensor = overheard(partial(agreed_outline, window, gradient_pass(processes)))
    return told
