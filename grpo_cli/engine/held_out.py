"""The datasets that a run evaluates on, loaded: prompts, rewards, and how answers are found."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from grpo_cli.data.fingerprint import digest
from grpo_cli.data.preflight import preflight
from grpo_cli.data.prompts import PromptBuilder
from grpo_cli.data.sampler import PromptSampler
from grpo_cli.data.sources import image_places, load_rows
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.rewards import load_scorer, shares_limits
from grpo_cli.engine.shared_scoring import Scorer
from grpo_cli.engine.vision import VisionLoader
from grpo_cli.errors import DataError, RewardError
from grpo_cli.evaluation.question import Question
from grpo_cli.evaluation.sheet import Sheet
from grpo_cli.recipe.eval_tasks import EvalTask, evaluation_tasks, pass_sizes
from grpo_cli.recipe.imports import resolve
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import DatasetSection, GenerationSection
from grpo_cli.types import Prompt

FOUND_ANSWER = "eval/answer"
"""Column of completion files with what `eval.answer_function` found."""

AnswerFunction = Callable[[str], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """One dataset to evaluate on.

    Attributes:
        task: What the recipe says.
        prompts: All of its prompts.
        scorer: Its rewards.
        answer_of: Finds the answer in a completion's text; None: a reward function logs it, or nobody does.
        lines: What to tell a person about the dataset.
    """

    task: EvalTask
    prompts: Sequence[Prompt]
    scorer: Scorer
    answer_of: AnswerFunction | None
    lines: Sequence[str]

    @property
    def weights(self) -> tuple[float, ...]:
        """One weight per reward function."""
        return tuple(self.task.rewards.reward_weights or [1.0] * len(self.scorer.names))

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.ids) for prompt in self.prompts)

    @property
    def most_images(self) -> int:
        """Images of a prompt that has most."""
        return max(len(prompt.images) for prompt in self.prompts)

    def completions(self, engines: int = 1) -> int:
        """Count the completions that each of several engines samples at most."""
        return math.ceil(len(self.prompts) / engines) * self.task.settings.num_generations

    def longest_sequence(self, generation: GenerationSection) -> int:
        """Count the tokens of the longest prompt and completion that there can be."""
        return self.longest_prompt + (self.task.settings.max_completion_length or generation.max_completion_length)

    def seed_key(self, seed: int) -> tuple[int | str, ...]:
        """Give what seeds its completions. It is the same at every evaluation, so that two of them can be compared."""
        return (seed, "eval") if self.task.name is None else (seed, "eval", self.task.name)

    def prompt_digest(self) -> str:
        """Hash what is completed."""
        return digest([(prompt.uid, prompt.ids, *prompt.images) for prompt in self.prompts])

    def row_digest(self) -> str:
        """Hash the rows that the rewards look at."""
        return digest([prompt.row for prompt in self.prompts])

    def question(self) -> Question:
        """Say what is asked of its completions."""
        settings = self.task.settings
        return Question(
            success_reward=None if settings.success is None else settings.success.reward,
            threshold=1.0 if settings.success is None else settings.success.threshold,
            sizes=pass_sizes(settings.num_generations),
            subsets=None if settings.subset_column is None else self._subsets(settings.subset_column),
        )

    def sheet(self, table: pa.Table) -> Sheet:
        """Read a table of its completions, which has the answers by now."""
        return Sheet.from_table(
            table,
            reward_names=self.scorer.names,
            reward_weights=self.weights,
            answers=self.task.settings.answer_column if self.answer_of is None else FOUND_ANSWER,
        )

    def with_answers(self, table: pa.Table) -> pa.Table:
        """Add the answers to a table of completions, if a function finds them.

        Raises:
            RewardError: If it raises.
        """
        if self.answer_of is None:
            return table
        answers = [self._answer(text) for text in table.column("completion").to_pylist()]
        column = pa.array(answers, pa.string())
        if FOUND_ANSWER in table.column_names:
            return table.set_column(table.column_names.index(FOUND_ANSWER), FOUND_ANSWER, column)
        return table.append_column(FOUND_ANSWER, column)

    def _answer(self, text: str) -> str | None:
        assert self.answer_of is not None
        try:
            answer = self.answer_of(text)
        except Exception as error:
            key, path = self.task.key_of("answer_function"), self.task.settings.answer_function
            raise RewardError(
                f"{key}: {path} raised {type(error).__name__}: {error} for the completion {text[:60]!r}",
                hint="let it return None where there is no answer",
            ) from error
        return None if answer is None else str(answer)

    def _subsets(self, column: str) -> tuple[str, ...]:
        missing = next((prompt for prompt in self.prompts if column not in prompt.row), None)
        if missing is not None:
            raise DataError(
                f'{self.task.key_of("subset_column")}: found "{column}"; {self.task.key} has the columns '
                f"{', '.join(sorted(missing.row))}"
            )
        return tuple(str(prompt.row[column]) for prompt in self.prompts)


def load_scorers(loaded: LoadedRecipe, processes: Processes, scorer: Scorer | None = None) -> tuple[Scorer, ...]:
    """Load the rewards of each dataset that a recipe evaluates on, once where several share them.

    Args:
        loaded: The recipe.
        processes: The processes of this run; all of them come here.
        scorer: The run's rewards, for datasets that have none of their own; None: they are loaded if they are needed, and again if those
            of the main process, which evaluates, call more slowly since others do so, too.

    Raises:
        RewardError: As `load_scorer` does.
        ModelError: As `load_scorer` does.
    """
    rewards = replace(loaded.recipe.rewards, spread=False)
    if scorer is not None and shares_limits(loaded.recipe.rewards, scorer, processes):
        scorer = None
    scorers: list[Scorer] = []
    for task in evaluation_tasks(loaded.recipe):
        if task.has_own_rewards:
            scorers.append(load_scorer(task.rewards, loaded, processes))
            continue
        if scorer is None:
            scorer = load_scorer(rewards, loaded, processes)
        scorers.append(scorer)
    return tuple(scorers)


def load_all_held_out(
    loaded: LoadedRecipe, tokenizer: Any, vision: VisionLoader, scorers: Sequence[Scorer]
) -> tuple[HeldOut, ...]:
    """Load the datasets that a recipe evaluates on; none if it has none.

    Args:
        loaded: The recipe.
        tokenizer: The policy's.
        vision: Loads what prepares images, if there are some.
        scorers: From `load_scorers`.

    Raises:
        DataError: If a dataset cannot be read, gives no prompts, has no column for subsets, or is a stream without an end.
        RecipeError: If a function for answers cannot be imported.
        RewardError: If a dataset has no column that one of its rewards needs.
    """
    folder, seed = loaded.folder, loaded.recipe.train.seed
    return tuple(
        load_held_out(task, tokenizer, vision, scorer, folder=folder, seed=seed)
        for task, scorer in zip(evaluation_tasks(loaded.recipe), scorers, strict=True)
    )


def load_held_out(
    task: EvalTask, tokenizer: Any, vision: VisionLoader, scorer: Scorer, *, folder: Path, seed: int
) -> HeldOut:
    """Load a dataset to evaluate on.

    Args:
        task: What the recipe says.
        tokenizer: The policy's.
        vision: Loads what prepares images, if there are some.
        scorer: Its rewards.
        folder: The recipe's folder.
        seed: The run's.

    Raises:
        DataError: If the dataset cannot be read, gives no prompts, has no column for subsets, or is a stream without an end.
        RecipeError: If the function for answers cannot be imported.
        RewardError: If there is no column that one of its rewards needs.
    """
    path = task.settings.answer_function
    prompts, lines = _load_prompts(task.dataset, task.key, tokenizer, vision, folder=folder, seed=seed)
    loaded = HeldOut(
        task=task,
        prompts=prompts,
        scorer=scorer,
        answer_of=None if path is None else resolve(path, folder),
        lines=[f"evaluation {line}" if task.name is None else f"{task.name}: {line}" for line in lines],
    )
    scorer.check_columns(prompts[0].row)
    loaded.question()  # it looks at the column for subsets
    return loaded


def _load_prompts(
    section: DatasetSection, key: str, tokenizer: Any, vision: VisionLoader, *, folder: Path, seed: int
) -> tuple[list[Prompt], list[str]]:
    """Load all prompts of a dataset, and what there is to say about it."""
    try:
        rows = load_rows(section, folder=folder)
        if not isinstance(rows, Dataset):
            raise DataError("dataset: a stream has no end to evaluate", hint="set dataset.streaming to false")
        builder = PromptBuilder(tokenizer, section, vision=vision.of(rows), places=image_places(section, folder=folder))
        found = preflight(rows, builder, measured=None)  # all of them are prepared below
        sampler = PromptSampler(rows, builder, found, seed=seed, shuffle=False)
        lines = [*vision.overlooked(rows, section, key=key), *found.lines()]
        return sampler.take(sampler.rows_per_epoch), lines
    except DataError as error:  # the stage knows its section by its usual name only
        hint = None if error.hint is None else error.hint.replace("dataset.", f"{key}.")
        raise DataError(f"{key}{error.message.removeprefix('dataset')}", hint=hint) from error
