"""The rewards that a recipe names: loaded, and what failed of them."""

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.shared_scoring import Scorer, SharedScorer
from grpo_cli.metrics import Metrics, Sum
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import RewardsSection
from grpo_cli.scoring.functions import load_rewards
from grpo_cli.scoring.runtime import RewardScorer, Scores


def load_scorer(section: RewardsSection, loaded: LoadedRecipe, processes: Processes) -> Scorer:
    """Load reward functions, in the main process alone; all processes come here.

    Args:
        section: Names them: the run's, or that of a dataset of its evaluation.
        loaded: The recipe.
        processes: The processes of this run.

    Raises:
        RewardError: There, if one cannot be called or constructed with the recipe's parameters.
        ModelError: There, if a reward model does not load.
    """
    scorer = None
    if processes.is_main:
        trusts = loaded.recipe.model.trust_remote_code
        rewards = load_rewards(section, folder=loaded.folder, device=processes.device, trust_remote_code=trusts)
        scorer = RewardScorer(rewards, on_error=section.on_error, error_value=section.error_value)
    return scorer if scorer is not None and processes.count == 1 else SharedScorer(scorer, processes)


def failed_too_often(scores: Scores, budget: float) -> bool:
    """Tell whether reward functions failed on at least the share of the prompts that `rewards.failure_budget` does not allow."""
    return scores.failed_prompts >= budget * len(scores.groups)


def failure_metrics(scores: Scores) -> Metrics:
    """Count the prompts on which reward functions failed."""
    return {
        "rewards/dropped_prompts": Sum(sum(one.dropped for one in scores.groups)),
        "rewards/failed_prompts": Sum(scores.failed_prompts),
    }
