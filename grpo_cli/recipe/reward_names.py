"""What a reward is called."""

import re

from grpo_cli.recipe.schema import RewardFunction


def reward_name(entry: RewardFunction) -> str:
    """Give the name of a reward in metrics and files."""
    if entry.name is not None:
        return entry.name
    if entry.path is not None:
        return re.split(r"[.:]", entry.path)[-1]
    return (entry.model or "").rstrip("/").rsplit("/", 1)[-1]
