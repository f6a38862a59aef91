"""The rewards of a recipe, tried on completions that are there already: no model is loaded."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from pyarrow import ArrowException

from grpo_cli.data.prompts import PromptBuilder, Rejected, prompt_id
from grpo_cli.data.sources import image_places, load_rows
from grpo_cli.engine.run_length import run_length
from grpo_cli.engine.vision import VisionLoader
from grpo_cli.errors import DataError
from grpo_cli.metrics import Metrics
from grpo_cli.policy.load import load_tokenizer
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import Recipe
from grpo_cli.recipe.suggest import did_you_mean
from grpo_cli.scoring.functions import load_rewards
from grpo_cli.scoring.runtime import RewardScorer
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt, ScoredGroup

_SAVED = ("prompt_uid", "index", "prompt", "completion", "finish_reason")
"""Columns of a completion file that are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCompletion:
    """A completion out of a file, or given by hand.

    Attributes:
        row: Number of the dataset row that it completes.
        prompt: The prompt's text as it was then; None: whatever it is now.
        text: Of the completion.
        finish_reason: Why it ended.
    """

    row: int
    prompt: str | None
    text: str
    finish_reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTrial:
    """What came of it.

    Attributes:
        scored: The completions, by prompt.
        names: The rewards' names.
        weights: Their weights.
        metrics: What the functions logged, and what their calls took.
        problems: A line for each prompt that a function failed on.
        descriptions: What rewards say of themselves.
    """

    scored: Sequence[ScoredGroup]
    names: Sequence[str]
    weights: Sequence[float]
    metrics: Metrics
    problems: Sequence[str]
    descriptions: Sequence[str]


def saved_completions(path: Path) -> list[SavedCompletion]:
    """Read a completion file that a run wrote in training, such as `completions/train-000010.parquet`.

    Raises:
        DataError: If it is none.
    """
    try:
        table = pq.read_table(path)
    except (OSError, ArrowException) as error:
        reason = "there is no such file" if not path.exists() else " ".join(str(error).split())
        raise DataError(
            f"{path}: {reason}", hint="a run writes such files into completions/ of its run directory"
        ) from error
    missing = [name for name in _SAVED if name not in table.column_names]
    if missing:
        raise DataError(
            f"{path}: there is no column `{missing[0]}`; allowed: a completion file of a run, with {', '.join(_SAVED)}",
            hint=did_you_mean(missing[0], table.column_names),
        )
    if not len(table):
        raise DataError(f"{path}: there are no completions in it")
    return [
        SavedCompletion(
            row=int(one["prompt_uid"].rpartition(":")[2]),
            prompt=one["prompt"],
            text=one["completion"],
            finish_reason=FinishReason(one["finish_reason"]),
        )
        for one in table.select(list(_SAVED)).to_pylist()
    ]


def score_completions(loaded: LoadedRecipe, completions: Sequence[SavedCompletion], *, step: int) -> RewardTrial:
    """Score completions of the recipe's dataset. A function that fails on one prompt is called on the others all the same.

    Args:
        loaded: The recipe.
        completions: Those of one prompt stand together.
        step: Where in the run the reward functions are told to be.

    Raises:
        DataError: If a completion's prompt is not one of the recipe's dataset.
        RewardError: If a reward cannot be loaded, or needs what is not there.
    """
    recipe = loaded.recipe
    rewards = load_rewards(
        recipe.rewards, folder=loaded.folder, device=_device(), trust_remote_code=recipe.model.trust_remote_code
    )
    scorer = RewardScorer(rewards, on_error="value", error_value=math.nan)
    try:
        rows = load_rows(recipe.dataset, folder=loaded.folder)
        if not isinstance(rows, Dataset):
            raise DataError("dataset.streaming: found true; allowed here: false, for rows are looked up by number")
        groups = list(_groups(recipe, rows, completions, folder=loaded.folder))
        scorer.check_columns(groups[0].prompt.row)
        scores = scorer.score(groups, _state(recipe, step, rows=len(rows)))
    finally:
        scorer.close()
    return RewardTrial(
        scored=scores.groups,
        names=scorer.names,
        weights=recipe.rewards.reward_weights or [1.0] * len(scorer.names),
        metrics=scores.metrics,
        problems=scores.problems,
        descriptions=scorer.descriptions,
    )


def _groups(recipe: Recipe, rows: Dataset, completions: Sequence[SavedCompletion], *, folder: Path) -> Iterator[Group]:
    """Put completions to the prompts of their rows."""
    tokenizer = load_tokenizer(recipe.model, folder=folder)
    vision = VisionLoader(recipe.model, folder=folder).of(rows)
    places = image_places(recipe.dataset, folder=folder)
    builder = PromptBuilder(tokenizer, recipe.dataset, vision=vision, places=places)
    for row, members in groupby(completions, key=lambda one: one.row):
        saved = list(members)
        if row >= len(rows):
            hint = None if saved[0].prompt is None else "is this the dataset of that run?"
            raise DataError(f"dataset: there is no row {row}; it has {len(rows)}", hint=hint)
        prompt = _prompt(builder, rows[row], row, saved[0].prompt)
        texts = [one.text for one in saved]
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
        yield Group(
            prompt=prompt,
            completions=tuple(
                Completion(
                    index=index,
                    ids=tuple(tokens),
                    logps=torch.zeros(len(tokens)),
                    text=one.text,
                    finish_reason=one.finish_reason,
                    policy_version=PolicyVersion(0),
                )
                for index, (one, tokens) in enumerate(zip(saved, ids, strict=True))
            ),
        )


def _prompt(builder: PromptBuilder, columns: Mapping[str, Any], row: int, then: str | None) -> Prompt:
    prompt = builder.build(columns, prompt_id(0, row))
    if isinstance(prompt, Rejected):
        raise DataError(f"dataset: row {row} gives no prompt: {prompt.reason}")
    if then is not None and then != prompt.text:
        raise DataError(
            f"dataset: the prompt of row {row} is not the one that was completed",
            hint="take the recipe of that run, and a file of its training: the rows of an evaluation are those of another dataset",
        )
    return prompt


def _state(recipe: Recipe, step: int, *, rows: int) -> TrainerState:
    total = run_length(recipe.train, recipe.grpo, rows=rows).total_steps
    return TrainerState(
        global_step=step,
        max_steps=total,
        epoch=step * recipe.train.prompts_per_step / rows,
        progress=min(step / total, 1.0),
    )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
