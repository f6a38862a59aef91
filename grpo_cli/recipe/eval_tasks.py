"""The datasets that a recipe evaluates on, each with all that is said about it, and the metrics that come of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from grpo_cli.recipe.kinds import fields_of
from grpo_cli.recipe.reward_names import reward_name
from grpo_cli.recipe.schema import (
    DatasetSection,
    EvalDatasetSection,
    EvalSection,
    Recipe,
    RewardsSection,
)

PREFIX = "eval/"
"""What the names of evaluations' metrics begin with."""

MEAN_REWARD = f"{PREFIX}reward"
"""Of several datasets: the mean of their rewards."""

_SETTINGS = tuple(name for name in fields_of(EvalDatasetSection) if name in fields_of(EvalSection))

_LENGTHS = tuple(f"{which}_{kind}" for which in ("mean", "min", "max") for kind in ("length", "terminated_length"))


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalTask:
    """One dataset to evaluate on.

    Attributes:
        name: Its name in `eval.datasets`; None: it is `eval.dataset`.
        key: Where it stands in the recipe.
        dataset: Its rows.
        rewards: What is good there.
        has_own_rewards: Whether these are others than the run's.
        settings: How completions are drawn and measured: `eval`, and what the dataset says over it.
        own: Names of the settings that it says itself.
    """

    name: str | None
    key: str
    dataset: DatasetSection
    rewards: RewardsSection
    has_own_rewards: bool
    settings: EvalSection
    own: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """Name it in files and tables."""
        return self.name or "dataset"

    @property
    def prefix(self) -> str:
        """Give what the names of its metrics begin with."""
        return PREFIX if self.name is None else f"{PREFIX}{self.name}/"

    def key_of(self, setting: str) -> str:
        """Give the recipe key that a setting comes from."""
        return f"{self.key}.{setting}" if setting in self.own else f"eval.{setting}"


def evaluation_tasks(recipe: Recipe) -> tuple[EvalTask, ...]:
    """Give the datasets that a recipe evaluates on; none if it has no held-out rows."""
    section = recipe.eval
    settings = replace(section, dataset=None, datasets=None)
    tasks = [] if section.dataset is None else [_unnamed(recipe, section.dataset, settings)]
    return (*tasks, *(_named(recipe, name, one, settings) for name, one in (section.datasets or {}).items()))


def reward_sections(recipe: Recipe) -> Iterator[tuple[str, RewardsSection]]:
    """Give the sections of a recipe that name rewards, by key."""
    yield "rewards", recipe.rewards
    yield from ((task.key, task.rewards) for task in evaluation_tasks(recipe) if task.has_own_rewards)


def pass_sizes(num_generations: int) -> tuple[int, ...]:
    """Give the k of `pass@k`: powers of two up to the completions per prompt, and their number itself."""
    powers = (2**power for power in range(num_generations.bit_length()))
    return tuple(dict.fromkeys((*powers, num_generations)))


def possible_metrics(recipe: Recipe) -> list[str]:
    """Name the metrics that the recipe's evaluations can have, those aside that a reward function may log."""
    tasks = evaluation_tasks(recipe)
    names = [MEAN_REWARD] if any(task.name is not None for task in tasks) else []
    return [*names, *(f"{task.prefix}{name}" for task in tasks for name in _metrics_of(task))]


def _metrics_of(task: EvalTask) -> Iterator[str]:
    yield from ("reward", "reward_std", "frac_reward_zero_std", "rewards/dropped_prompts", "rewards/failed_prompts")
    for name in map(reward_name, task.rewards.reward_funcs):
        yield from (f"reward/{name}/{kind}" for kind in ("mean", "std", "failed_prompts", "repeated_calls"))
        yield from (f"time/reward/{name}{kind}" for kind in ("", "/mean", "/max"))
    yield from (f"completions/{name}" for name in (*_LENGTHS, "clipped_ratio"))
    count = task.settings.num_generations
    yield f"avg@{count}"
    yield from (f"pass@{size}" for size in pass_sizes(count))
    yield f"maj@{count}"


def _unnamed(recipe: Recipe, dataset: DatasetSection, settings: EvalSection) -> EvalTask:
    return EvalTask(
        name=None,
        key="eval.dataset",
        dataset=dataset,
        rewards=recipe.rewards,
        has_own_rewards=False,
        settings=settings,
    )


def _named(recipe: Recipe, name: str, section: EvalDatasetSection, settings: EvalSection) -> EvalTask:
    said: dict[str, Any] = {setting: getattr(section, setting) for setting in _SETTINGS}
    own = {setting: value for setting, value in said.items() if value is not None}
    has_own_rewards = section.reward_funcs is not None
    rewards = recipe.rewards
    if section.reward_funcs is not None:
        own_funcs, weights = section.reward_funcs, section.reward_weights
        rewards = replace(
            rewards, reward_funcs=own_funcs, reward_weights=weights, spread=False
        )  # one process evaluates
    return EvalTask(
        name=name,
        key=f"eval.datasets.{name}",
        dataset=section,
        rewards=rewards,
        has_own_rewards=has_own_rewards,
        settings=replace(settings, **own),
        own=frozenset(own),
    )
