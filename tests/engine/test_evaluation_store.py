"""What an evaluation keeps on disk comes back as it was, and is not taken for another one's."""

import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from tiny_models import build_tiny_tokenizer

from grpo_cli.engine.evaluation_store import EvaluationStore
from grpo_cli.errors import CheckpointError
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt, PromptId

SCORED_WITH = {"functions": [{"path": "a.b", "parameters": {"length": 3}}], "weights": (1.0,)}
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


def test_completions_come_back_as_they_were_sampled_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    store = EvaluationStore(folder=tmp_path)
    groups = [make_group(number, f"one {number}", "ä") for number in (3, 5, 4)]
    assert store.kept() == set()
    store.keep(groups[1:])
    assert store.kept() == {"0:5", "0:4"}
    store.keep(groups[:1])
    assert store.kept() == {"0:3", "0:5", "0:4"}
    found = store.read([group.prompt for group in groups], build_tiny_tokenizer())
    for mine, theirs in zip(found, groups, strict=True):
        assert mine.prompt == theirs.prompt
        for ours, others in zip(mine.completions, theirs.completions, strict=True):
            assert (ours.index, ours.ids, ours.text, ours.finish_reason) == (
                others.index, others.ids, others.text, others.finish_reason,
            )  # fmt: skip


@pytest.mark.parametrize("numbers", [(4,), (3, 4), ()])
def test_completions_of_other_prompts_are_refused(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    store = EvaluationStore(folder=tmp_path)
    store.keep([make_group(3, "one")])
    with pytest.raises(CheckpointError, match="holds completions of other prompts"):
        store.read([make_group(number, "one").prompt for number in numbers or (3, 5)], build_tiny_tokenizer())


def test_completions_come_back_with_their_numbers_and_can_be_scored_again(tmp_path: Path) -> None:
    store = EvaluationStore(folder=tmp_path)
    store.keep([make_group(3, "one")])
    assert store.read_completions() is None
    assert store.changed_scoring(SCORED_WITH) is None
    numbers = {"reward_std": 0.25, "reward": float("nan")}
    store.write_completions(pa.table({"reward/a": [0.5, None]}), numbers, scored_with=SCORED_WITH)
    completions = store.read_completions()
    assert completions is not None
    table, numbers = completions
    assert table.to_pydict() == {"reward/a": [0.5, None]}
    assert repr(numbers) == "{'reward_std': 0.25, 'reward': nan}"
    assert store.changed_scoring(SCORED_WITH) == []
    assert store.changed_scoring({**SCORED_WITH, "weights": [2.0]}) == ["weights"]
    assert store.kept(), "what is scored again is there"


def test_a_folder_is_that_of_one_evaluation(tmp_path: Path) -> None:
    store = EvaluationStore(folder=tmp_path / "letters")
    store.claim(MADE_WITH)
    store.keep([make_group(3, "one")])
    store.claim(MADE_WITH)
    assert store.kept(), "it is gone on with"
    other = {**MADE_WITH, "sampling": {"temperature": 0.5, "stop_ids": (1, 2)}}
    with pytest.raises(CheckpointError, match=r"another sampling\.temperature: 1\.0, and now 0\.5"):
        store.claim(other)
    assert store.kept()
    store.clear()
    store.claim(other)
    assert not store.kept()


def test_completions_of_nobody_are_not_taken_over(tmp_path: Path) -> None:
    """A kill between removing the claim and the completions left them so."""
    store = EvaluationStore(folder=tmp_path / "letters")
    store.claim(MADE_WITH)
    store.keep([make_group(3, "one")])
    (store.folder / "made_with.json").unlink()
    with pytest.raises(CheckpointError, match=r"part-00000\.parquet is there without made_with\.json"):
        store.claim(MADE_WITH)


def test_starting_over_removes_nothing_of_a_users_and_the_claim_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = EvaluationStore(folder=tmp_path / "letters")
    store.claim(MADE_WITH)
    for _ in range(2):
        store.keep([make_group(3, "one")])
    store.write_completions(pa.table({"reward/a": [0.5]}), {}, scored_with=SCORED_WITH)
    (store.folder / ".writing-part-00002.parquet").write_bytes(b"torn")
    notes = ("notes.txt", "part-of-mine.parquet")
    for name in notes:
        (store.folder / name).write_text("mine")
    removed: list[str] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    store.clear()
    assert sorted(path.name for path in store.folder.iterdir()) == sorted(notes)
    assert removed[-1] == "made_with.json"


@pytest.mark.parametrize("name", ["made_with.json", "part-00000.parquet", "completions.parquet"])
@pytest.mark.parametrize("left", [0, 9, -9])
def test_a_damaged_file_is_named(name: str, left: int, tmp_path: Path) -> None:
    store, group = EvaluationStore(folder=tmp_path), make_group(3, "one")
    store.claim(MADE_WITH)
    store.keep([group])
    store.write_completions(pa.table({"reward/a": [0.5]}), {}, scored_with=SCORED_WITH)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):  # noqa: PT012  only one of them raises
        store.claim(MADE_WITH)
        store.read([group.prompt], build_tiny_tokenizer())
        store.changed_scoring(SCORED_WITH)


def test_completions_that_come_back_take_little_memory(tmp_path: Path) -> None:
    """Less than 16 bytes a token, of which 8 are its place in the tuple: there were 44."""
    store, group, size = EvaluationStore(folder=tmp_path), make_group(3, "one"), 200_000
    long = replace(group.completions[0], ids=tuple(range(300, 500)) * (size // 200))
    store.keep([replace(group, completions=(long,))])
    kept = store.read([group.prompt], build_tiny_tokenizer())[0].completions[0]
    integers = {id(token): sys.getsizeof(token) for token in kept.ids}
    taken = sys.getsizeof(kept.ids) + sum(integers.values()) + kept.logps.untyped_storage().nbytes()
    assert kept.ids == long.ids
    assert kept.logps.shape == (size,)
    assert kept.logps.isnan().all()
    assert taken < 16 * size
