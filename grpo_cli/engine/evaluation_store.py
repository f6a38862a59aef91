"""What an evaluation has on disk: completions as they are sampled, then all of them with their rewards.

A part is there completely or not at all, and so is every other file: an evaluation that was killed goes on with the first part that is
missing, and comes to the same numbers, for it reads what it wrote in any case.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from grpo_cli.errors import CheckpointError
from grpo_cli.recipe.compare import changed_keys
from grpo_cli.telemetry.completions import write_table
from grpo_cli.telemetry.files import disk_errors, write_whole
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt

_NUMBERS = b"grpo"
"""Under this name the completion file holds what is known of all completions together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationStore:
    """The folder of one dataset of one model's evaluation.

    Attributes:
        folder: See above.
    """

    folder: Path

    def claim(self, made_with: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make the folder that of an evaluation.

        Args:
            made_with: All that its completions and rewards depend on, as JSON.
            overwrite: Whether another one's may be removed; otherwise what is there is gone on with.

        Raises:
            CheckpointError: If it is that of another one.
        """
        path = self.folder / "made_with.json"
        plain = json.loads(json.dumps(made_with, default=str))
        if overwrite:
            shutil.rmtree(self.folder, ignore_errors=True)
        with disk_errors(path, doing="read"):
            before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if before is None:
            write_whole(path, json.dumps(plain, indent=1).encode())
            return
        for key, (then, now) in changed_keys(before, plain).items():
            raise CheckpointError(
                f"--output: {self.folder} holds an evaluation with another {key}: {_short(then)}, and now {_short(now)}",
                hint="name another folder with --output, or start over with --overwrite",
            )

    def has_part(self, number: int) -> bool:
        """Tell whether a part is sampled."""
        return self._part(number).is_file()

    def write_part(self, number: int, groups: Sequence[Group]) -> None:
        """Keep the completions of some prompts.

        Raises:
            TrainingError: If they cannot be written.
        """
        rows = [(group.prompt, completion) for group in groups for completion in group.completions]
        table = pa.table(
            {
                "prompt_uid": pa.array([prompt.uid for prompt, _ in rows], pa.string()),
                "ids": pa.array([completion.ids for _, completion in rows], pa.list_(pa.int32())),
                "finish_reason": pa.array([completion.finish_reason.value for _, completion in rows], pa.string()),
            }
        )
        write_table(table, self._part(number))

    def read_part(self, number: int, prompts: Sequence[Prompt], tokenizer: Any) -> list[Group]:
        """Give the completions of some prompts back; nothing is known of their log-probabilities.

        Args:
            number: Of the part.
            prompts: Its prompts.
            tokenizer: Makes text of the tokens.

        Raises:
            CheckpointError: If they are those of other prompts.
        """
        with disk_errors(self._part(number), doing="read"):
            table = pq.read_table(self._part(number))
        uids, ids = table.column("prompt_uid").to_pylist(), table.column("ids").to_pylist()
        size = len(uids) // len(prompts)
        if uids != [prompt.uid for prompt in prompts for _ in range(size)]:
            raise CheckpointError(
                f"--output: {self._part(number)} holds other prompts", hint="start over with --overwrite"
            )
        reasons = table.column("finish_reason").to_pylist()
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        completions = [
            Completion(
                index=row % size,
                ids=tuple(tokens),
                logps=torch.full((len(tokens),), float("nan")),
                text=text,
                finish_reason=FinishReason(reason),
                policy_version=PolicyVersion(0),
            )
            for row, (tokens, text, reason) in enumerate(zip(ids, texts, reasons, strict=True))
        ]
        return [
            Group(prompt=prompt, completions=tuple(completions[number * size : (number + 1) * size]))
            for number, prompt in enumerate(prompts)
        ]

    def write_completions(self, table: pa.Table, numbers: Mapping[str, float]) -> None:
        """Keep every completion with its rewards; from here on the parts are not needed any more.

        Args:
            table: The completions.
            numbers: What is known of all of them together.

        Raises:
            TrainingError: If they cannot be written.
        """
        write_table(table.replace_schema_metadata({_NUMBERS: json.dumps(numbers).encode()}), self.completions_path)
        for path in self.folder.glob("part-*.parquet"):
            path.unlink()

    def read_completions(self) -> tuple[pa.Table, dict[str, float]] | None:
        """Give every completion with its rewards, and what is known of all of them together; None: they are not scored yet."""
        if not self.completions_path.is_file():
            return None
        with disk_errors(self.completions_path, doing="read"):
            table = pq.read_table(self.completions_path)
        return table, json.loads(table.schema.metadata[_NUMBERS])

    @property
    def completions_path(self) -> Path:
        """The file with every completion."""
        return self.folder / "completions.parquet"

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.parquet"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
