"""What a reward function says of itself, so that many processes can call it on a part of the completions each."""

from collections.abc import Callable
from typing import Any, TypeVar

RewardFunction = TypeVar("RewardFunction", bound=Callable[..., Any])


def independent(function: RewardFunction) -> RewardFunction:
    """Say that what a function gives for a completion depends on no completion of another prompt, and on no earlier call."""
    vars(function)["independent"] = True
    return function
