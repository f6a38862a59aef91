"""The rewards that a recipe names: loaded, and what failed of them."""

from collections.abc import Sequence
from dataclasses import replace

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.shared_scoring import Scorer, SharedScorer
from grpo_cli.errors import RewardError
from grpo_cli.metrics import Metrics, Sum
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import RewardsSection
from grpo_cli.scoring.functions import are_independent, load_rewards
from grpo_cli.scoring.reward import Reward, has_state
from grpo_cli.scoring.runtime import RewardScorer, Scores


def load_scorer(section: RewardsSection, loaded: LoadedRecipe, processes: Processes) -> Scorer:
    """Load reward functions: in the main process alone, or where they are spread in each; all processes come here.

    Args:
        section: Names them: the run's, or that of a dataset of its evaluation.
        loaded: The recipe.
        processes: The processes of this run.

    Raises:
        RewardError: There, if one cannot be called or constructed with the recipe's parameters, or has a state that each process would
            have another of.
        ModelError: There, if a reward model does not load.
    """
    scorer, spread = None, _is_spread(section, loaded, processes)
    if spread:
        section = _shared_limits(section, processes.count)
    if processes.is_main or spread:
        trusts = loaded.recipe.model.trust_remote_code
        rewards = load_rewards(section, folder=loaded.folder, device=processes.device, trust_remote_code=trusts)
        scorer = RewardScorer(rewards, on_error=section.on_error, error_value=section.error_value)
        if spread:
            _refuse_states(rewards, scorer)
    return scorer if scorer is not None and (spread or processes.count == 1) else SharedScorer(scorer, processes)


def _is_spread(section: RewardsSection, loaded: LoadedRecipe, processes: Processes) -> bool:
    """Tell whether each process is to call the functions; the main one looks at them if the recipe leaves that open.

    Raises:
        RecipeError: There, if one cannot be imported.
    """
    if section.spread is not None:
        return section.spread
    if processes.count == 1:
        return False
    independent = processes.is_main and are_independent(section, folder=loaded.folder)
    return bool(processes.most(int(independent)))


def shares_limits(section: RewardsSection, scorer: Scorer, processes: Processes) -> bool:
    """Tell whether a scorer calls less often than the recipe allows in a minute, since those of other processes call, too."""
    limited = any(entry.calls_per_minute is not None for entry in section.reward_funcs)
    return limited and processes.count > 1 and not isinstance(scorer, SharedScorer)


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
