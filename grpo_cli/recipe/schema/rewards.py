"""`rewards:` what is good."""

from dataclasses import dataclass
from typing import Any, Literal

from grpo_cli.recipe.schema.option import option

REWARD_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "completions_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)
"""What every reward function can ask for besides dataset columns: no column can have such a name."""

RESERVED_COLUMNS = frozenset({"prompt", "completion", *REWARD_ARGUMENTS})
"""Dataset columns of these names do not reach reward functions."""


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
    isolated: bool | None = option(
        None,
        help="Call it in processes of its own, which are ended and replaced when they hang, crash or take too much memory. Left out: "
        "if the function says so (`isolated = True`), if it has a `memory_limit`, or if it is no `async def` and has a `timeout`, "
        "`calls_per_minute`, or a `concurrency` above 1.",
    )
    timeout: float | None = option(
        None,
        above=0,
        help="Seconds for one call, after which it has failed. Left out: 300 for an isolated function, no limit otherwise.",
    )
    memory_limit: float | None = option(
        None,
        above=0,
        help="GiB that a process of an isolated function, with all that it starts, may take; 8 if left out.",
    )
    per_prompt: bool = option(
        False,
        help="Call it for each prompt's completions alone instead of once for all of a step: several calls at the same time, which fail "
        "by themselves. An isolated or `async def` function begins while other prompts are still being completed.",
    )
    concurrency: int = option(
        1, minimum=1, help="Calls at the same time with `per_prompt`, of an isolated function in as many processes."
    )
    calls_per_minute: float | None = option(
        None,
        above=0,
        help="Begin no more calls than this in any minute; none: no limit. Where rewards are spread that is for all processes together, each "
        "of which may begin one more after a pause.",
    )
    retries: int = option(
        0, minimum=0, help="Times that a call is made again, after a growing pause, before it has failed."
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
    on_error: Literal["stop", "drop", "value"] = option(
        "stop",
        help="When a reward function raises, takes too long or returns what it must not: stop the run, drop the prompt from the step, or "
        "give the prompt's completions `error_value` for this function.",
    )
    error_value: float | None = option(
        None, help="Reward of completions on which a function failed; needed by `on_error: value`."
    )
    failure_budget: float = option(
        1.0,
        above=0,
        maximum=1,
        help="Stop the run all the same if functions failed on at least this share of the prompts that were completed together; 1: only "
        "if on all of them.",
    )
    spread: bool | None = option(
        None,
        help="With several processes, let each call the functions on the completions that it sampled, instead of the first on all of "
        "them. Left out: if all look at one prompt at a time, as reward models do and functions that say so of themselves "
        "(`independent = True`), and none has a state or is `isolated: true`.",
    )
