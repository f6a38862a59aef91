"""The recipe's schema: one dataclass a section. Option names are TRL's where one exists."""

from dataclasses import dataclass

from grpo_cli.recipe.schema.dataset import DatasetSection
from grpo_cli.recipe.schema.distributed import DistributedSection
from grpo_cli.recipe.schema.eval import EvalDatasetSection, EvalSection, SuccessSection
from grpo_cli.recipe.schema.generation import GenerationSection
from grpo_cli.recipe.schema.grpo import GrpoSection
from grpo_cli.recipe.schema.logging import LoggingSection
from grpo_cli.recipe.schema.model import LoraSection, ModelSection
from grpo_cli.recipe.schema.option import option
from grpo_cli.recipe.schema.rewards import RewardFunction, RewardsSection
from grpo_cli.recipe.schema.train import TrainSection
from grpo_cli.recipe.schema.vllm import VllmSection

__all__ = [
    "DatasetSection",
    "DistributedSection",
    "EvalDatasetSection",
    "EvalSection",
    "GenerationSection",
    "GrpoSection",
    "LoggingSection",
    "LoraSection",
    "ModelSection",
    "Recipe",
    "RewardFunction",
    "RewardsSection",
    "SuccessSection",
    "TrainSection",
    "VllmSection",
]


@dataclass(kw_only=True)
class Recipe:
    """A whole run."""

    run_name: str = option("run", non_empty=True, help="Name of the run; the recipe's file name if left out.")
    model: ModelSection = option(factory=ModelSection, help="The policy.")
    dataset: DatasetSection = option(factory=DatasetSection, help="The prompts.")
    rewards: RewardsSection = option(factory=RewardsSection, help="The rewards.")
    grpo: GrpoSection = option(factory=GrpoSection, help="Advantages and objective.")
    generation: GenerationSection = option(factory=GenerationSection, help="Sampling.")
    vllm: VllmSection = option(factory=VllmSection, help="The rollout engine, if it is vLLM.")
    train: TrainSection = option(factory=TrainSection, help="The loop.")
    eval: EvalSection = option(factory=EvalSection, help="Evaluation.")
    distributed: DistributedSection = option(factory=DistributedSection, help="Several processes.")
    logging: LoggingSection = option(factory=LoggingSection, help="What is shown and recorded.")
