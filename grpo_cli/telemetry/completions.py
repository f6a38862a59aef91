"""Completion files: sampled completions with their rewards, one parquet file per generation or evaluation."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_cli.telemetry.files import disk_errors, write_whole
from grpo_cli.telemetry.logged_columns import shown_names
from grpo_cli.telemetry.records import Evaluation, Rollouts
from grpo_cli.telemetry.thumbnails import marked, thumbnail_column
from grpo_cli.types import IMAGE, IMAGES, ScoredGroup

_INT64 = range(-(2**63), 2**63)
_STEP = re.compile(r"(\d+)\.parquet$")


class CompletionFiles:
    """Writes `completions/train-{step}.parquet`, and `eval/{step}.parquet` or `eval/{dataset}-{step}.parquet`.

    Args:
        output_dir: The run directory.
        reward_names: One name per reward function [F].
    """

    def __init__(self, output_dir: Path, reward_names: Sequence[str]) -> None:
        self.train_folder = output_dir / "completions"
        self.eval_folder = output_dir / "eval"
        self._reward_names = tuple(reward_names)

    def write_training(self, step: int, rollouts: Rollouts) -> None:
        """Write what a step generated.

        Raises:
            TrainingError: If the file cannot be written.
        """
        advantages = [value for values in rollouts.advantages for value in values.tolist()]
        table = completion_table(rollouts.scored, self._reward_names, step=step, advantages=advantages)
        write_table(table, self.train_folder / f"train-{step:06d}.parquet")

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Write what an evaluation sampled.

        Raises:
            TrainingError: If the file cannot be written.
        """
        for name, table in evaluation.tables.items():
            dataset = "" if name is None else f"{name}-"
            write_table(table, self.eval_folder / f"{dataset}{evaluation.step:06d}.parquet")

    def drop_after(self, train_step: int, eval_step: int) -> None:
        """Remove the files of later steps, and those that were never finished.

        Raises:
            TrainingError: If a file cannot be removed.
        """
        for folder, last in ((self.train_folder, train_step), (self.eval_folder, eval_step)):
            for path in folder.glob("*.parquet"):
                step = _STEP.search(path.name)
                if path.name.startswith(".writing-") or (step and int(step[1]) > last):
                    with disk_errors(path):
                        path.unlink()


def completion_table(
    scored: Sequence[ScoredGroup], reward_names: Sequence[str], *, step: int, advantages: Sequence[float] | None = None
) -> pa.Table:
    """Lay out completions as rows, group by group.

    Args:
        scored: The groups.
        reward_names: One name per reward function [F].
        step: The same in every row.
        advantages: One per row, in training.

    Returns:
        Columns step, prompt_uid, index, prompt, images (thumbnails, if the dataset has some), completion, finish_reason, num_tokens,
        policy_version, reward/{name}, advantage (if given), and those that reward functions logged (see `shown_names`); `extra/` stands before a logged name that is taken. A reward that did
        not apply is null, and so is a logged column in groups that did not log it.
    """
    rows = [(one.group.prompt, completion) for one in scored for completion in one.group.completions]
    # By the dataset, so that all files of a run have the same columns.
    has_images = any(name in prompt.row for prompt, _ in rows for name in (IMAGE, IMAGES))
    columns = {
        "step": pa.array([step] * len(rows), pa.int64()),
        "prompt_uid": pa.array([prompt.uid for prompt, _ in rows], pa.string()),
        "index": pa.array([completion.index for _, completion in rows], pa.int32()),
        "prompt": pa.array([_writable(prompt.text) for prompt, _ in rows], pa.string()),
        **({IMAGES: thumbnail_column([prompt for prompt, _ in rows])} if has_images else {}),
        "completion": pa.array([_writable(completion.text) for _, completion in rows], pa.string()),
        "finish_reason": pa.array([completion.finish_reason.value for _, completion in rows], pa.string()),
        "num_tokens": pa.array([len(completion.ids) for _, completion in rows], pa.int32()),
        "policy_version": pa.array([completion.policy_version for _, completion in rows], pa.int64()),
    }
    rewards = [reward for one in scored for reward in one.rewards.tolist()]
    for number, name in enumerate(reward_names):
        values = [None if math.isnan(reward[number]) else reward[number] for reward in rewards]
        columns[f"reward/{name}"] = pa.array(values, pa.float32())
    if advantages is not None:
        columns["advantage"] = pa.array(advantages, pa.float32())
    names = shown_names(scored, reward_names)
    for column in sorted(names, key=lambda column: names[column]):
        logged = [value for one in scored for value in one.extras.get(column, (None,) * len(one.group.completions))]
        name = names[column]
        columns[f"extra/{name}" if name in columns else name] = _logged_column(logged)
    return marked(pa.table(columns)) if has_images else pa.table(columns)


def _logged_column(values: Sequence[Any]) -> pa.Array:
    """Find a column type for whatever was logged; what has no common one becomes text."""
    plain = [_plain(value) for value in values]
    present = [value for value in plain if value is not None]
    kinds = {type(value) for value in present}
    if not kinds:
        return pa.nulls(len(plain))
    if kinds == {bool}:
        return pa.array(plain, pa.bool_())
    if kinds <= {int, float} and all(isinstance(value, float) or value in _INT64 for value in present):
        if kinds == {int}:
            return pa.array(plain, pa.int64())
        # Rounded here: Arrow refuses integers that a float does not hold exactly.
        return pa.array([None if value is None else float(value) for value in plain], pa.float64())
    return pa.array([None if value is None else _writable(str(value)) for value in plain], pa.string())


def _plain(value: Any) -> Any:
    """Turn a NumPy or torch scalar into Python's."""
    try:
        return value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return value


def _writable(text: str) -> str:
    """Replace what UTF-8 cannot hold (lone surrogates) by escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table, complete or not at all.

    Raises:
        TrainingError: If the file cannot be written.
    """
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd")
    write_whole(path, buffer.getvalue().to_pybytes())
