"""`rewards:` what is good."""

from dataclasses import dataclass
from typing import Any, Literal

from grpo_cli.recipe.schema.option import option


@dataclass(kw_only=True)
class RewardFunction:
    """One reward: a function by dotted path, or a reward model. A plain string in the list is short for `path`."""

    path: str | None = option(
        None,
        help="Dotted path of a function, a class or a callable object, such as `rewards.length.close_to_characters`.",
    )
    model: str | None = option(
        None, help="Hub id or folder of a sequence-classification model with one label, instead of `path`."
    )
    name: str | None = option(None, help="Name in metrics and files; by default the last part of `path` or `model`.")
    parameters: dict[str, Any] = option(
        factory=dict, help="Bound as keyword arguments to a function; given to the constructor of a class."
    )
    batch_size: int = option(16, minimum=1, help="Completions that a reward model scores at once.")
    max_length: int | None = option(None, minimum=1, help="Tokens after which a reward model's input is cut.")


@dataclass(kw_only=True)
class RewardsSection:
    """Reward functions, their weights, and what to do when one fails."""

    reward_funcs: list[RewardFunction] = option(
        factory=list, non_empty=True, help="Reward functions: dotted paths, or mappings with the keys below."
    )
    reward_weights: list[float] | None = option(None, help="One weight per reward function; all 1 if left out.")
    on_error: Literal["stop", "drop"] = option(
        "stop",
        help="When a reward function raises or returns what it must not: stop the run, or drop the prompt from the step.",
    )
