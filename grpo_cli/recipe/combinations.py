"""Rules across keys, for recipes whose every single value is allowed. A new rule is a new function in `CHECKS`."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from grpo_cli.recipe.distributed_rules import DISTRIBUTED_CHECKS
from grpo_cli.recipe.eval_rules import EVAL_CHECKS
from grpo_cli.recipe.eval_tasks import evaluation_tasks
from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.idle_settings import IDLE_CHECKS
from grpo_cli.recipe.objective_rules import OBJECTIVE_CHECKS
from grpo_cli.recipe.quantization_rules import QUANTIZATION_CHECKS
from grpo_cli.recipe.reward_rules import REWARD_CHECKS
from grpo_cli.recipe.schema import DatasetSection, Recipe
from grpo_cli.recipe.vllm_rules import VLLM_CHECKS

_SLICE = re.compile(r"\[.*\]$")
_PROJECT_TRACKERS = ("wandb", "trackio")


def dataset_sections(recipe: Recipe) -> Iterator[tuple[str, DatasetSection]]:
    """Give the datasets of a recipe by key."""
    yield "dataset", recipe.dataset
    yield from ((task.key, task.dataset) for task in evaluation_tasks(recipe))


def completions_can_vary(recipe: Recipe) -> Iterable[Finding]:
    """A group of equal completions has nothing to learn from."""
    if recipe.generation.top_k == 1:
        yield Finding(
            keys=("generation.top_k",),
            message="found 1: all completions of a prompt would be the same; allowed: 0 (all tokens) or at least 2",
        )
    if recipe.generation.min_p == 1:
        yield Finding(
            keys=("generation.min_p",),
            message="found 1, which leaves only the likeliest token: all completions of a prompt would be the same; allowed: below 1",
        )


def lengths_fit(recipe: Recipe) -> Iterable[Finding]:
    """The least completion is not longer than the longest."""
    generation = recipe.generation
    least, most = "generation.min_completion_length", "generation.max_completion_length"
    if generation.min_completion_length > generation.max_completion_length:
        yield Finding(
            keys=(least, most),
            message=f"found {generation.min_completion_length}; allowed: at most {most}, which is "
            f"{generation.max_completion_length}",
        )


def sampling_can_be_reproduced(recipe: Recipe) -> Iterable[Finding]:
    """Both sides of the importance ratio come from one distribution."""
    if recipe.generation.repetition_penalty != 1:
        yield Finding(
            keys=("generation.repetition_penalty",),
            message=f"found {recipe.generation.repetition_penalty:g}; allowed: 1, because the log-probabilities of training "
            "cannot reproduce a penalty that depends on all tokens before, and the ratio would be wrong",
            hint="use the reward `rewards.repetition.repetition_penalty`; `eval.repetition_penalty` may differ from 1",
        )


def gradients_can_be_represented(recipe: Recipe) -> Iterable[Finding]:
    """The range of float16 ends where gradients begin."""
    if recipe.model.dtype == "float16":
        yield Finding(
            keys=("model.dtype",),
            message="found float16; allowed: auto, float32, bfloat16, because small gradients are 0 in float16 and the loss is not "
            "scaled to prevent it",
            hint="use float32 with `train.bf16: true`, or bfloat16 to save memory",
        )


def stops_are_possible(recipe: Recipe) -> Iterable[Finding]:
    """Stop strings and ids can occur."""
    for index, text in enumerate(recipe.generation.stop):
        if not text:
            key = f"generation.stop[{index}]"
            yield Finding(keys=(key,), message='found ""; allowed: a string that is not empty')
    for index, token in enumerate(recipe.generation.stop_token_ids):
        if token < 0:
            key = f"generation.stop_token_ids[{index}]"
            yield Finding(keys=(key,), message=f"found {token}; allowed: token ids, at least 0")


def datasets_are_consistent(recipe: Recipe) -> Iterable[Finding]:
    """A dataset's keys go together."""
    for key, dataset in dataset_sections(recipe):
        if dataset.streaming and _SLICE.search(dataset.split):
            yield Finding(
                keys=(f"{key}.split", f"{key}.streaming"),
                message=f'found "{dataset.split}"; allowed with `streaming`: a split without a slice',
                hint=f"use `{key}.max_rows`",
            )
        if dataset.max_prompt_length is None and dataset.max_prompt_length_policy != "drop":
            yield Finding(
                keys=(f"{key}.max_prompt_length_policy", f"{key}.max_prompt_length"),
                message=f"found {dataset.max_prompt_length_policy} without a length; allowed: together with "
                f"`{key}.max_prompt_length`",
            )


def run_has_an_end(recipe: Recipe) -> Iterable[Finding]:
    """The number of steps can be known."""
    if recipe.dataset.streaming and recipe.train.max_steps is None:
        yield Finding(
            keys=("train.max_steps", "dataset.streaming"),
            message="not set; required with `dataset.streaming`, because a stream has no known length",
        )


def parts_can_learn(recipe: Recipe) -> Iterable[Finding]:
    """Parts of the model with a learning rate of their own are trained."""
    for part, rate in recipe.train.learning_rates.items():
        key = f"train.learning_rates.{part}"
        if rate < 0:
            yield Finding(keys=(key,), message=f"found {rate:g}; allowed: a number, at least 0")
        if part in recipe.model.freeze:
            yield Finding(
                keys=(key, "model.freeze"), message=f"found {rate:g} for a part that model.freeze keeps as it is"
            )


def warmup_is_clear(recipe: Recipe) -> Iterable[Finding]:
    """There is one warm-up, the schedule has it, and it ends before the run does."""
    train = recipe.train
    warmup = next((key for key in ("warmup_steps", "warmup_ratio") if getattr(train, key)), None)
    if train.warmup_steps and train.warmup_ratio:
        yield Finding(
            keys=("train.warmup_ratio", "train.warmup_steps"),
            message=f"found {train.warmup_ratio:g} beside warmup_steps {train.warmup_steps}; allowed: one of the two",
        )
    elif warmup is not None and train.lr_scheduler_type == "constant":
        yield Finding(
            keys=(f"train.{warmup}", "train.lr_scheduler_type"),
            message=f"found {getattr(train, warmup):g}, but the schedule constant has no warm-up; allowed: 0",
            hint="did you mean `lr_scheduler_type: constant_with_warmup`?",
        )
    if train.max_steps is not None and train.warmup_steps >= train.max_steps:
        yield Finding(
            keys=("train.warmup_steps", "train.max_steps"),
            message=f"found {train.warmup_steps}; allowed: less than train.max_steps, which is {train.max_steps}",
        )


def trackers_are_consistent(recipe: Recipe) -> Iterable[Finding]:
    """Each tracker is named once, and a project belongs to a tracker that has projects."""
    for tracker, count in Counter(recipe.logging.report_to).items():
        if count > 1:
            yield Finding(keys=("logging.report_to",), message=f"found {tracker} {count} times; allowed: each once")
    if recipe.logging.project is not None and not set(recipe.logging.report_to) & set(_PROJECT_TRACKERS):
        yield Finding(
            keys=("logging.project", "logging.report_to"),
            message=f'found "{recipe.logging.project}", but no tracker has projects; allowed: with wandb or trackio in '
            "`logging.report_to`",
        )


CHECKS: tuple[Callable[[Recipe], Iterable[Finding]], ...] = (
    *REWARD_CHECKS,
    *OBJECTIVE_CHECKS,
    *IDLE_CHECKS,
    completions_can_vary,
    lengths_fit,
    sampling_can_be_reproduced,
    gradients_can_be_represented,
    stops_are_possible,
    datasets_are_consistent,
    run_has_an_end,
    parts_can_learn,
    warmup_is_clear,
    *EVAL_CHECKS,
    trackers_are_consistent,
    *QUANTIZATION_CHECKS,
    *VLLM_CHECKS,
    *DISTRIBUTED_CHECKS,
)


def impossible_combinations(recipe: Recipe) -> Iterator[Finding]:
    """Run all checks. What several datasets have in common is found once."""
    yield from dict.fromkeys(finding for check in CHECKS for finding in check(recipe))
