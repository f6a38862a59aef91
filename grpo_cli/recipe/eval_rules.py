"""Rules across the keys of `eval:`: what is evaluated, how completions are drawn there, and what can be measured."""

import re
from collections.abc import Callable, Iterable

from grpo_cli.recipe.eval_tasks import PREFIX, evaluation_tasks, possible_metrics
from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.idle_settings import changed, idle
from grpo_cli.recipe.kinds import fields_of
from grpo_cli.recipe.reward_names import reward_name
from grpo_cli.recipe.schema import EvalSection, Recipe
from grpo_cli.recipe.suggest import did_you_mean, nearest

_DATASETS = ("dataset", "datasets")
_SETTINGS = tuple(name for name in fields_of(EvalSection) if name not in (*_DATASETS, "every"))
_SAMPLING_FILTERS = ("top_p", "top_k", "min_p")
_SAME_EACH_TIME = (("temperature", 0, "above 0"), ("top_k", 1, "above 1, or to 0 for all"), ("min_p", 1, "below 1"))
"""Settings that leave the likeliest token alone, and what they would have to be instead."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_OWN_FAMILIES = re.compile(r"(reward|reward/.*|reward_std|rewards/.*|completions/.*|[a-z]+@.*)")
"""Names of metrics that no reward function may log."""

_OF_SUCCESS = re.compile(r"(avg|pass|maj)@")
"""Beginnings of metrics that count correct completions."""

_USUAL = re.compile(r"reward|reward/.*/mean|(avg|pass|maj)@.*")
"""Names of metrics that a best checkpoint is usually picked by."""

_MISSPELT = 0.85
"""How much a name has to look like another one to be a misspelling of it."""


def datasets_are_told_apart(recipe: Recipe) -> Iterable[Finding]:
    """There is one dataset without a name, or several with names that metrics and files can have."""
    section = recipe.eval
    if section.dataset is not None and section.datasets is not None:
        yield Finding(
            keys=("eval.dataset", "eval.datasets"),
            message="found beside `eval.datasets`; allowed: one of them",
            hint="give it a name in `eval.datasets`",
        )
    for name in section.datasets or {}:
        if _NAME.fullmatch(name) is None:
            yield Finding(
                keys=(f"eval.datasets.{name}", "eval.datasets"),
                message=f'found the name "{name}"; allowed: letters, digits, - and _, because metrics and files have it in theirs',
            )


def evaluation_has_rows(recipe: Recipe) -> Iterable[Finding]:
    """How to evaluate is said only where something is evaluated."""
    if evaluation_tasks(recipe):
        return
    if recipe.eval.every > 0:
        yield Finding(
            keys=("eval.every", "eval.dataset"),
            message=f"found {recipe.eval.every} without `eval.dataset`; allowed: 0",
            hint="name the held-out rows in `eval.dataset`",
        )
    yield from idle(
        recipe.eval,
        _SETTINGS,
        prefix="eval",
        beside="eval.dataset",
        reason="nothing is evaluated",
        needed="`eval.dataset`",
    )


def filters_have_a_choice(recipe: Recipe) -> Iterable[Finding]:
    """Without randomness the likeliest token is taken, and no filter removes that one."""
    tasks = evaluation_tasks(recipe)
    all_greedy = all(task.settings.temperature == 0 for task in tasks)
    for task in tasks:
        if task.settings.temperature > 0:
            continue
        for name, value, hint in changed(task.settings, _SAMPLING_FILTERS):
            if name in task.own or all_greedy:
                yield Finding(
                    keys=(task.key_of(name), task.key_of("temperature")),
                    message=f"found {value}, but temperature 0 takes the likeliest token anyway; allowed with "
                    f"`{task.key_of('temperature')}` above 0",
                    hint=hint,
                )


def samples_can_vary(recipe: Recipe) -> Iterable[Finding]:
    """Several completions of a prompt are several only if they are drawn."""
    for task in evaluation_tasks(recipe):
        settings = task.settings
        if settings.num_generations == 1:
            continue
        for name, sames, cure in _SAME_EACH_TIME:
            if getattr(settings, name) == sames:
                yield Finding(
                    keys=(task.key_of("num_generations"), task.key_of(name)),
                    message=f"found {settings.num_generations} with {name} {sames:g}, which samples the same completion each time; "
                    "allowed: 1",
                    hint=f"or set `{task.key_of(name)}` {cure}",
                )
                break


def lengths_fit(recipe: Recipe) -> Iterable[Finding]:
    """The least completion is not longer than the longest."""
    generation = recipe.generation
    least = generation.min_completion_length
    if least > generation.max_completion_length:  # which is reported by itself
        return
    for task in evaluation_tasks(recipe):
        most = task.settings.max_completion_length
        if most is not None and most < least:
            yield Finding(
                keys=(task.key_of("max_completion_length"), "generation.min_completion_length"),
                message=f"found {most}; allowed: at least generation.min_completion_length, which is {least}",
            )


def weights_have_functions(recipe: Recipe) -> Iterable[Finding]:
    """A dataset's weights are those of its own reward functions."""
    for name, section in (recipe.eval.datasets or {}).items():
        if section.reward_weights is not None and section.reward_funcs is None:
            key = f"eval.datasets.{name}.reward_weights"
            yield Finding(
                keys=(key, f"eval.datasets.{name}.reward_funcs"),
                message="found weights without reward functions; allowed: beside `reward_funcs` of the dataset",
            )


def success_is_a_reward(recipe: Recipe) -> Iterable[Finding]:
    """What counts as correct is said by a reward function that there is."""
    for task in evaluation_tasks(recipe):
        success, names = task.settings.success, [reward_name(entry) for entry in task.rewards.reward_funcs]
        if success is not None and success.reward not in names:
            funcs = f"{task.key}.reward_funcs" if task.has_own_rewards else "rewards.reward_funcs"
            yield Finding(
                keys=(f"{task.key_of('success')}.reward", funcs),
                message=f'found "{success.reward}"; allowed: a reward function of {task.key}: {", ".join(names)}',
                hint=did_you_mean(success.reward, names),
            )


def best_metric_is_possible(recipe: Recipe) -> Iterable[Finding]:
    """The best checkpoint is picked by a metric that an evaluation can have.

    Reward functions may log metrics that are not known here: of names that are no metric's, only those are refused that look as if one was
    meant, and those that reward functions must not log.
    """
    found, possible = recipe.eval.best_metric, possible_metrics(recipe)
    if not possible or found in possible:
        return
    prefixes = [task.prefix for task in evaluation_tasks(recipe)]
    prefix = next((one for one in prefixes if found.startswith(one)), None)
    hint: str | None
    if not found.startswith(PREFIX):
        allowed, hint = "a metric of the evaluation, which starts with eval/", f"did you mean `{PREFIX}{found}`?"
    elif prefix is None:
        allowed, hint = (
            f"eval/reward, or a metric that starts with {', '.join(prefixes)}",
            did_you_mean(found, possible),
        )
    else:
        bare = found.removeprefix(prefix)
        names = [name.removeprefix(prefix) for name in possible if name.startswith(prefix)]
        close = nearest(bare, names, cutoff=_MISSPELT)
        if close is None and _OWN_FAMILIES.fullmatch(bare) is None:
            return
        usual = ", ".join(f"{prefix}{name}" for name in names if _USUAL.fullmatch(name))
        allowed, hint = f"a metric of the evaluation, such as {usual}", None
        if close is not None:
            hint = f"did you mean `{prefix}{close}`?"
    yield Finding(
        keys=("eval.best_metric", "eval.dataset", "eval.datasets"),
        message=f'found "{found}"; allowed: {allowed}',
        hint=hint,
    )


def best_metric_is_always_there(recipe: Recipe) -> Iterable[Finding]:
    """What is correct is said where it picks the best checkpoint: otherwise an evaluation with another reward than 0 and 1 has no such metric.

    Whether a reward function logs the answers for `maj@k` is seen when it is called: the first evaluation tells.
    """
    found = recipe.eval.best_metric
    if found not in possible_metrics(recipe):  # which is reported by itself
        return
    for task in evaluation_tasks(recipe):
        bare = found.removeprefix(task.prefix)
        rewards = [reward_name(entry) for entry in task.rewards.reward_funcs]
        if bare != found and _OF_SUCCESS.match(bare) and task.settings.success is None and rewards:
            yield Finding(
                keys=("eval.best_metric", task.key_of("success")),
                message=f'found "{found}" without `{task.key_of("success")}`; allowed: beside it, so that every evaluation has the metric',
                hint=f"success: {{reward: {rewards[0]}, threshold: 1}}",
            )


EVAL_CHECKS: tuple[Callable[[Recipe], Iterable[Finding]], ...] = (
    datasets_are_told_apart,
    evaluation_has_rows,
    filters_have_a_choice,
    samples_can_vary,
    lengths_fit,
    weights_have_functions,
    success_is_a_reward,
    best_metric_is_possible,
    best_metric_is_always_there,
)
