"""The rewards that a recipe names: loaded, and what failed of them."""

from collections.abc import Sequence
from dataclasses import replace

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.shared_scoring import Scorer, SharedScorer
from grpo_cli.errors import RewardError
from grpo_cli.metrics import Metrics, Sum
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import RewardsSection
from grpo_cli.scoring.functions import load_rewards
from grpo_cli.scoring.reward import Reward, has_state
from grpo_cli.scoring.runtime import RewardScorer, Scores


def load_scorer(section: RewardsSection, loaded: LoadedRecipe, processes: Processes) -> Scorer:
    """Load reward functions: in the main process alone, or with `rewards.spread` in each; all processes come here.

    Args:
        section: Names them: the run's, or that of a dataset of its evaluation.
        loaded: The recipe.
        processes: The processes of this run.

    Raises:
        RewardError: There, if one cannot be called or constructed with the recipe's parameters, or has a state that each process would
            have another of.
        ModelError: There, if a reward model does not load.
    """
    scorer = None
    if shares_limits(section, processes):
        section = _shared_limits(section, processes.count)
    if processes.is_main or section.spread:
        trusts = loaded.recipe.model.trust_remote_code
        rewards = load_rewards(section, folder=loaded.folder, device=processes.device, trust_remote_code=trusts)
        scorer = RewardScorer(rewards, on_error=section.on_error, error_value=section.error_value)
        if section.spread:
            _refuse_states(rewards, scorer)
    return (
        scorer if scorer is not None and (section.spread or processes.count == 1) else SharedScorer(scorer, processes)
    )


def shares_limits(section: RewardsSection, processes: Processes) -> bool:
    """Tell whether processes have to share what a recipe allows of calls in a minute."""
    limited = any(entry.calls_per_minute is not None for entry in section.reward_funcs)
    return section.spread and processes.count > 1 and limited


def _shared_limits(section: RewardsSection, processes: int) -> RewardsSection:
    """Let the calls of all processes together be no more in a minute than the recipe allows, but for the first of each after a pause."""
    entries = [
        entry if entry.calls_per_minute is None else replace(entry, calls_per_minute=entry.calls_per_minute / processes)
        for entry in section.reward_funcs
    ]
    return replace(section, reward_funcs=entries)


def _refuse_states(rewards: Sequence[Reward], scorer: RewardScorer) -> None:
    """Refuse what a checkpoint would have to hold a state of, which each process would have another of.

    Raises:
        RewardError: If there is one; the scorer is closed then.
    """
    for reward in rewards:
        if has_state(reward.source):
            scorer.close()
            raise RewardError(
                f"rewards.spread: found true, but reward {reward.name!r} has a state (state_dict), which every process would have another "
                "of; allowed with functions that have none",
                hint="set rewards.spread: false, and the first process calls it on all completions",
            )


def failed_too_often(failed: int, prompts: int, budget: float) -> bool:
    """Tell whether reward functions failed on at least the share of the prompts that `rewards.failure_budget` does not allow."""
    return failed >= budget * prompts


def failure_metrics(scores: Scores) -> Metrics:
    """Count the prompts on which reward functions failed."""
    return {
        "rewards/dropped_prompts": Sum(sum(one.dropped for one in scores.groups)),
        "rewards/failed_prompts": Sum(scores.failed_prompts),
    }
