"""`eval:` held-out prompts, during training and for `grpo eval`."""

from dataclasses import dataclass

from grpo_cli.recipe.schema.dataset import DatasetSection
from grpo_cli.recipe.schema.option import option
from grpo_cli.recipe.schema.rewards import RewardFunction


@dataclass(kw_only=True)
class SuccessSection:
    """Which completions count as correct."""

    reward: str = option(non_empty=True, help="Name of a reward function of the dataset.")
    threshold: float = option(1.0, help="Least reward of a correct completion.")


@dataclass(kw_only=True)
class EvalDatasetSection(DatasetSection):
    """One of several datasets. It has the keys of `dataset` too; what is left out here is as in `rewards` and in `eval`."""

    reward_funcs: list[RewardFunction] | None = option(
        None, non_empty=True, help="Reward functions of this dataset, as in `rewards`."
    )
    reward_weights: list[float] | None = option(
        None, help="One weight per reward function of `reward_funcs`; all 1 if left out."
    )
    num_generations: int | None = option(None, minimum=1, help="Completions per prompt.")
    temperature: float | None = option(None, minimum=0, maximum=10, help="0 takes the likeliest token.")
    top_p: float | None = option(None, above=0, maximum=1, help="Keep the likeliest tokens up to this mass.")
    top_k: int | None = option(None, minimum=0, help="Keep this many tokens; 0 keeps all.")
    min_p: float | None = option(
        None, minimum=0, maximum=1, help="Keep tokens at least this likely, relative to the likeliest."
    )
    repetition_penalty: float | None = option(None, above=0, help="Lowers the logits of tokens seen before; 1 is off.")
    max_completion_length: int | None = option(None, minimum=1, help="Longest completion in tokens.")
    success: SuccessSection | None = option(None, help="Which completions count as correct.")
    answer_column: str | None = option(None, non_empty=True, help="Column with a completion's answer.")
    answer_function: str | None = option(None, help="Function that finds a completion's answer.")
    subset_column: str | None = option(None, help="Column by whose values everything is reported as well.")


@dataclass(kw_only=True)
class EvalSection:
    """Evaluation during training, which never touches its randomness, and by `grpo eval`."""

    dataset: DatasetSection | None = option(
        None, help="Held-out rows, with the keys of `dataset`; no evaluation if left out."
    )
    datasets: dict[str, EvalDatasetSection] | None = option(
        None,
        help="Several datasets instead of one, by name; the name becomes part of the metrics': `eval/{dataset}/reward`. `NAME: null` leaves one out.",
    )
    every: int = option(0, minimum=0, help="Steps between evaluations; 0 evaluates only at the start and the end.")
    num_generations: int = option(1, minimum=1, help="Completions per prompt.")
    temperature: float = option(0.0, minimum=0, maximum=10, help="0 takes the likeliest token.")
    top_p: float = option(1.0, above=0, maximum=1, help="Keep the likeliest tokens up to this mass.")
    top_k: int = option(0, minimum=0, help="Keep this many tokens; 0 keeps all.")
    min_p: float = option(
        0.0, minimum=0, maximum=1, help="Keep tokens at least this likely, relative to the likeliest."
    )
    repetition_penalty: float = option(1.0, above=0, help="Lowers the logits of tokens seen before; 1 is off.")
    max_completion_length: int | None = option(None, minimum=1, help="As in `generation` if left out.")
    success: SuccessSection | None = option(
        None,
        help="Which completions count as correct, for `avg@k`, `pass@k` and `maj@k`. Left out: those with 1 from the first reward "
        "function, if it gives nothing but 0 and 1.",
    )
    answer_column: str = option(
        "answer",
        non_empty=True,
        help="Column, logged by a reward function with `log_extra`, that holds a completion's answer for `maj@k`; None: it has none.",
    )
    answer_function: str | None = option(
        None,
        help="Dotted path of a function that finds the answer in a completion's text instead; it returns None where there is none.",
    )
    subset_column: str | None = option(
        None, help="Column of the dataset by whose values `grpo eval` reports everything as well."
    )
    best_metric: str = option(
        "eval/reward",
        non_empty=True,
        help="Evaluation metric that picks the best checkpoint; `avg@k`, `pass@k` and `maj@k` need `success`.",
    )
    greater_is_better: bool = option(True, help="Whether a larger `best_metric` is better.")
