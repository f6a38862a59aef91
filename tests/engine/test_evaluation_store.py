"""What an evaluation keeps on disk comes back as it was, and is not taken for another one's."""

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from tiny_models import build_tiny_tokenizer

from grpo_cli.engine.evaluation_store import EvaluationStore
from grpo_cli.errors import CheckpointError
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt, PromptId

MADE_WITH = {"weights": "abc", "sampling": {"temperature": 1.0, "stop_ids": (1, 2)}, "seed": 1}


def make_group(number: int, *texts: str) -> Group:
    tokenizer = build_tiny_tokenizer()
    return Group(
        prompt=Prompt(uid=PromptId(f"0:{number}"), ids=(1,), text="a", messages=None, row={"prompt": "a"}),
        completions=tuple(
            Completion(
                index=index,
                ids=(*tokenizer(text).input_ids, 257),
                logps=torch.zeros(len(text) + 1),
                text=text,
                finish_reason=FinishReason.STOP if index else FinishReason.LENGTH,
                policy_version=PolicyVersion(0),
            )
            for index, text in enumerate(texts)
        ),
    )


def test_a_part_comes_back_as_it_was_sampled(tmp_path: Path) -> None:
    store, groups = EvaluationStore(folder=tmp_path), [make_group(3, "one", "two"), make_group(5, "ä", "")]
    assert not store.has_part(7)
    store.write_part(7, groups)
    assert store.has_part(7)
    found = store.read_part(7, [group.prompt for group in groups], build_tiny_tokenizer())
    for mine, theirs in zip(found, groups, strict=True):
        assert mine.prompt == theirs.prompt
        for ours, others in zip(mine.completions, theirs.completions, strict=True):
            assert (ours.index, ours.ids, ours.text, ours.finish_reason) == (
                others.index, others.ids, others.text, others.finish_reason,
            )  # fmt: skip


def test_a_part_of_other_prompts_is_refused(tmp_path: Path) -> None:
    store = EvaluationStore(folder=tmp_path)
    store.write_part(0, [make_group(3, "one")])
    with pytest.raises(CheckpointError, match="holds other prompts"):
        store.read_part(0, [make_group(4, "one").prompt], build_tiny_tokenizer())


def test_completions_come_back_with_their_numbers_and_parts_go(tmp_path: Path) -> None:
    store = EvaluationStore(folder=tmp_path)
    store.write_part(0, [make_group(3, "one")])
    assert store.read_completions() is None
    store.write_completions(pa.table({"reward/a": [0.5, None]}), {"reward_std": 0.25, "reward": float("nan")})
    assert not store.has_part(0)
    completions = store.read_completions()
    assert completions is not None
    table, numbers = completions
    assert table.to_pydict() == {"reward/a": [0.5, None]}
    assert repr(numbers) == "{'reward_std': 0.25, 'reward': nan}"


def test_a_folder_is_that_of_one_evaluation(tmp_path: Path) -> None:
    store = EvaluationStore(folder=tmp_path / "letters")
    store.claim(MADE_WITH, overwrite=False)
    store.write_part(0, [make_group(3, "one")])
    store.claim(MADE_WITH, overwrite=False)
    assert store.has_part(0), "it is gone on with"
    other = {**MADE_WITH, "sampling": {"temperature": 0.5, "stop_ids": (1, 2)}}
    with pytest.raises(CheckpointError, match=r"another sampling\.temperature: 1\.0, and now 0\.5"):
        store.claim(other, overwrite=False)
    assert store.has_part(0)
    store.claim(other, overwrite=True)
    assert not store.has_part(0)
