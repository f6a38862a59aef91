"""What an evaluation has on disk: completions as they are sampled, then all of them with their rewards.

A part is there completely or not at all, and so is every other file: an evaluation that was killed goes on with the first part that is
missing, and comes to the same numbers, for it reads what it wrote in any case. Parts stay, so that completions can be scored again.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt, PromptId

_NOTES = b"grpo"
"""Under this name the completion file holds what is known of all completions together, and what their rewards depend on."""

_PART_NAME = re.compile(r"part-\d{5,}\.parquet")
_PART = pa.schema({"prompt_uid": pa.string(), "ids": pa.list_(pa.int32()), "finish_reason": pa.string()})


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationStore:
    """The folder of one dataset of one model's evaluation.

    Attributes:
        folder: See above.
    """

    folder: Path

    def clear(self) -> None:
        """Remove the evaluation, and nothing else that lies in the folder. Whose it was is known as long as anything of it is left.

        Raises:
            TrainingError: If something cannot be removed.
        """
        for path in (*self._completions(), self._claim_path):
            with disk_errors(path, doing="remove"):
                path.unlink(missing_ok=True)

    def claim(self, sampled_with: Mapping[str, Any]) -> None:
        """Make the folder that of an evaluation; what there is of it is gone on with.

        Args:
            sampled_with: All that its completions depend on, as JSON.

        Raises:
            CheckpointError: If it is that of another one, or nobody knows whose.
        """
        path, plain = self._claim_path, _plain(sampled_with)
        with _reading(path):
            before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if before is None:
            for left in self._completions():
                raise CheckpointError(
                    f"--output: {left} is there without {path.name}, which says what it was sampled with",
                    hint="name another folder with --output, or start over with --overwrite",
                )
            write_whole(path, json.dumps(plain, indent=1).encode())
            return
        for key, (then, now) in changed_keys(before, plain).items():
            raise CheckpointError(
                f"--output: {self.folder} holds an evaluation with another {key}: {_short(then)}, and now {_short(now)}",
                hint="name another folder with --output, or start over with --overwrite",
            )

    def kept(self) -> set[PromptId]:
        """Name the prompts whose completions are kept.

        Raises:
            CheckpointError: If a file is damaged.
        """
        uids: set[PromptId] = set()
        for path in self._parts():
            with _reading(path):
                uids.update(pq.read_table(path, columns=["prompt_uid"]).column("prompt_uid").to_pylist())
        return uids

    def keep(self, groups: Sequence[Group]) -> None:
        """Keep the completions of some prompts, beside those that are kept already.

        Raises:
            TrainingError: If they cannot be written.
        """
        rows = [(group.prompt, completion) for group in groups for completion in group.completions]
        table = pa.table(
            {
                "prompt_uid": [prompt.uid for prompt, _ in rows],
                "ids": [completion.ids for _, completion in rows],
                "finish_reason": [completion.finish_reason.value for _, completion in rows],
            },
            schema=_PART,
        )
        write_table(table, self.folder / f"part-{len(self._parts()):05d}.parquet")

    def read(self, prompts: Sequence[Prompt], tokenizer: Any) -> list[Group]:
        """Give the completions of all prompts back; nothing is known of their log-probabilities.

        Args:
            prompts: All of the dataset.
            tokenizer: Makes text of the tokens.

        Raises:
            CheckpointError: If they are those of other prompts.
        """
        places = {prompt.uid: place for place, prompt in enumerate(prompts)}
        tables = []
        for path in self._parts():
            with _reading(path):
                tables.append(pq.read_table(path, schema=_PART))
        table = pa.concat_tables(tables)
        uids = table.column("prompt_uid").to_pylist()
        size = len(uids) // len(prompts)
        counts = Counter(uids)
        if counts.keys() != places.keys() or set(counts.values()) != {size}:
            raise CheckpointError(
                f"--output: {self.folder} holds completions of other prompts", hint="start over with --overwrite"
            )
        # Written as they were complete; those of a prompt stand together.
        order = sorted(range(len(uids)), key=lambda row: places[uids[row]])
        table = table.take(pa.array(order))
        ids = table.column("ids").to_pylist()
        reasons = table.column("finish_reason").to_pylist()
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        one_of_each: dict[int, int] = {}  # an integer object for each token would take four times the memory
        unknown = torch.tensor(float("nan"))
        completions = [
            Completion(
                index=row % size,
                ids=tuple(one_of_each.setdefault(token, token) for token in tokens),
                logps=unknown.expand(len(tokens)),
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

    def write_completions(
        self, table: pa.Table, numbers: Mapping[str, float], *, scored_with: Mapping[str, Any]
    ) -> None:
        """Keep every completion with its rewards, instead of those that there were.

        Args:
            table: The completions.
            numbers: What is known of all of them together.
            scored_with: All that the rewards depend on besides, as JSON.

        Raises:
            TrainingError: If they cannot be written.
        """
        notes = json.dumps({"numbers": numbers, "scored_with": _plain(scored_with)})
        noted = table.replace_schema_metadata({**(table.schema.metadata or {}), _NOTES: notes.encode()})
        write_table(noted, self.completions_path)

    def changed_scoring(self, scored_with: Mapping[str, Any]) -> list[str] | None:
        """Name what the rewards depend on that is another by now; None: there are no rewards yet.

        Raises:
            CheckpointError: If the file is damaged.
        """
        if not self.completions_path.is_file():
            return None
        with _reading(self.completions_path):
            before = _notes(pq.read_schema(self.completions_path))["scored_with"]
        return [*changed_keys(before, _plain(scored_with))]

    def read_completions(self) -> tuple[pa.Table, dict[str, float]] | None:
        """Give every completion with its rewards, and what is known of all of them together; None: they are not scored yet.

        Raises:
            CheckpointError: If the file is damaged.
        """
        if not self.completions_path.is_file():
            return None
        with _reading(self.completions_path):
            table = pq.read_table(self.completions_path)
            return table, _notes(table.schema)["numbers"]

    @property
    def completions_path(self) -> Path:
        """The file with every completion."""
        return self.folder / "completions.parquet"

    @property
    def _claim_path(self) -> Path:
        return self.folder / "made_with.json"

    def _parts(self) -> list[Path]:
        return [path for path in sorted(self.folder.glob("part-*.parquet")) if _PART_NAME.fullmatch(path.name)]

    def _completions(self) -> list[Path]:
        """List all files that hold completions, those with rewards first."""
        names = re.compile(r"(\.writing-)?(completions|part-\d{5,})\.parquet")
        return [path for path in sorted(self.folder.glob("*")) if names.fullmatch(path.name)]


def _notes(schema: pa.Schema) -> dict[str, Any]:
    """Read what the completion file holds besides completions; ValueError: it holds nothing."""
    notes: dict[str, Any] = json.loads((schema.metadata or {}).get(_NOTES, b""))
    return notes


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Give values as they come back from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Tell a file that cannot be read from one that makes no sense.

    Raises:
        TrainingError: If it cannot be read.
        CheckpointError: If it is damaged.
    """
    with disk_errors(path, doing="read"):
        try:
            yield
        except (ValueError, KeyError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # Arrow's own has none
                raise
            raise CheckpointError(f"--output: {path} is damaged", hint="start over with --overwrite") from error


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
