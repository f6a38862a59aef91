"""Rules across the keys of `rewards`."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from grpo_cli.recipe.eval_tasks import reward_sections
from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.idle_settings import changed, idle
from grpo_cli.recipe.reward_names import reward_name
from grpo_cli.recipe.schema import Recipe, RewardFunction

_FOR_FUNCTIONS = ("isolated", "timeout", "memory_limit", "per_prompt", "concurrency", "calls_per_minute")
"""Keys that a reward model has no use for."""


def reward_weights_match(recipe: Recipe) -> Iterable[Finding]:
    """Each reward function has a weight, and not all weights are 0."""
    for key, section in reward_sections(recipe):
        weights, functions = section.reward_weights, section.reward_funcs
        if weights is None:
            continue
        keys = (f"{key}.reward_weights", f"{key}.reward_funcs")
        if len(weights) != len(functions):
            message = f"found {len(weights)} weights for {len(functions)} reward functions; allowed: one weight each"
            yield Finding(keys=keys, message=message)
        elif not any(weights):
            yield Finding(
                keys=keys,
                message="all weights are 0, so no reward counts; allowed: at least one other number",
                hint="leave the key out to weigh all 1",
            )


def reward_entries_are_whole(recipe: Recipe) -> Iterable[Finding]:
    """A reward is either a function or a model, and has only keys of its kind."""
    for key, entry in _entries(recipe):
        if (entry.path is None) == (entry.model is None):
            found = "neither `path` nor `model`" if entry.path is None else "both `path` and `model`"
            yield Finding(keys=(key,), message=f"found {found}; allowed: one of them")
        elif entry.model is not None:
            for name, value, hint in changed(entry, ("parameters", *_FOR_FUNCTIONS)):
                message = (
                    "a reward model takes no parameters; allowed: `parameters` beside `path`"
                    if name == "parameters"
                    else f"found {value}, but a reward model is called in the trainer's process, once for all completions; allowed: "
                    f"`{name}` beside `path`"
                )
                yield Finding(
                    keys=(f"{key}.{name}", f"{key}.model"), message=message, hint=None if name == "parameters" else hint
                )
        else:
            for name, _, hint in changed(entry, ("batch_size", "max_length")):
                yield Finding(
                    keys=(f"{key}.{name}", f"{key}.path"),
                    message=f"a reward function is given all completions, whole; allowed: `{name}` beside `model`",
                    hint=hint,
                )


def reward_names_differ(recipe: Recipe) -> Iterable[Finding]:
    """Metrics and files tell rewards apart by name."""
    for key, section in reward_sections(recipe):
        names = [reward_name(entry) for entry in section.reward_funcs]
        counts = Counter(names)
        for index, name in enumerate(names):
            first = names.index(name)
            if name and counts[name] > 1 and index > first:
                yield Finding(
                    keys=(f"{key}.reward_funcs[{index}]", f"{key}.reward_funcs[{first}]"),
                    message=f"found a second reward with the name `{name}`; allowed: one name each",
                    hint=f"add `name: {name}_2`",
                )


def calls_can_be_made_so(recipe: Recipe) -> Iterable[Finding]:
    """How a function is called fits together."""
    for key, entry in _entries(recipe):
        if entry.path is not None and not entry.per_prompt:
            yield from idle(
                entry,
                ("concurrency",),
                prefix=key,
                beside=f"{key}.per_prompt",
                reason="the function is called once for all of a step",
                needed="`per_prompt: true`",
            )
        if entry.isolated is False:
            yield from idle(
                entry,
                ("memory_limit",),
                prefix=key,
                beside=f"{key}.isolated",
                reason="the trainer's own process is not ended over a reward",
                needed="`isolated: true`",
            )


def _entries(recipe: Recipe) -> Iterator[tuple[str, RewardFunction]]:
    """Give all rewards of a recipe by key."""
    for key, section in reward_sections(recipe):
        yield from ((f"{key}.reward_funcs[{index}]", entry) for index, entry in enumerate(section.reward_funcs))


def failures_have_a_consequence(recipe: Recipe) -> Iterable[Finding]:
    """What becomes of a failure is said, and read."""
    rewards = recipe.rewards
    if rewards.on_error == "value" and rewards.error_value is None:
        yield Finding(
            keys=("rewards.error_value", "rewards.on_error"),
            message="not set; required with `on_error: value`: the reward of completions on which a function failed",
        )
    if rewards.on_error != "value" and rewards.error_value is not None:
        yield Finding(
            keys=("rewards.error_value", "rewards.on_error"),
            message=f"found {rewards.error_value:g}, but on_error {rewards.on_error} does not use it; allowed with value",
            hint="did you mean `on_error: value`?",
        )
    if rewards.on_error == "stop":
        yield from idle(
            rewards,
            ("failure_budget",),
            prefix="rewards",
            beside="rewards.on_error",
            reason="the first failure stops the run",
            needed="`on_error: drop` or `value`",
        )


REWARD_CHECKS: tuple[Callable[[Recipe], Iterable[Finding]], ...] = (
    reward_weights_match,
    reward_entries_are_whole,
    reward_names_differ,
    calls_can_be_made_so,
    failures_have_a_consequence,
)
