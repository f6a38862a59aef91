"""Checkpoints on disk: atomic, complete or passed over, pruned."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from grpo_cli.engine.checkpoint_store import BestCheckpoint, CheckpointStore
from grpo_cli.engine.manifest import damage
from grpo_cli.engine.run_directory import NEWEST, checkpoint_to_resume, locked, refuse_to_overwrite, remove_run
from grpo_cli.errors import CheckpointError


def write(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"1234")
    (folder / "state.json").write_text("{}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_checkpoint_is_complete_and_alone(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path, keep=2).save(3, write)
    assert path.name == "step-000003"
    assert damage(path) is None
    assert names(tmp_path) == ["step-000003"]


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (
            lambda path: (path / "model" / "weights").write_bytes(b"1235"),
            "model/weights has changed since it was written",
        ),
        (lambda path: (path / "model" / "weights").write_bytes(b"123"), "model/weights has 3 bytes instead of 4"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json cannot be read: "),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_message(harm: object, expected: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    older, newer = store.save(1, write), store.save(2, write)
    harm(newer)  # type: ignore[operator]
    said: list[str] = []
    assert checkpoint_to_resume(NEWEST, store, said.append) == older
    (message,) = said
    assert message.startswith(f"passing over checkpoint step-000002: {expected}")
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        checkpoint_to_resume(str(newer), store, said.append)


def test_a_damaged_checkpoint_is_written_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    path = store.save(1, write)
    (path / "state.json").unlink()
    store.save(1, write)
    assert damage(path) is None


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 7):
        store.save(step, write)
        if step == 2:
            store.mark_best(BestCheckpoint(step=2, metric="eval/reward", value=1.0))
    assert (store.steps(), store.best) == ([2, 5, 6], BestCheckpoint(step=2, metric="eval/reward", value=1.0))
    (tmp_path / ".writing-step-000009").mkdir()
    store.start_from(5, best=BestCheckpoint(step=4, metric="eval/reward", value=1.0))
    assert (store.steps(), store.best) == ([2, 5], None)  # the checkpoint of step 4 is not there
    assert names(tmp_path) == ["step-000002", "step-000005"]


def test_folders_of_other_names_are_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    (tmp_path / "step-000001-backup").mkdir()
    for step in (1, 2):
        store.save(step, write)
    assert store.steps() == [2]
    assert names(tmp_path) == ["step-000001-backup", "step-000002"]


@pytest.mark.parametrize("way", ["bytes", "tensors"])
def test_a_full_disk_leaves_the_older_checkpoint_and_says_what_to_do(way: str, tmp_path: Path) -> None:
    """A file-size limit of the process stands for the full disk: the write fails in the operating system."""
    fill = {
        "bytes": '(folder / "a").write_bytes(bytes(20_000))',
        "tensors": 'save_file({"a": torch.zeros(20_000)}, folder / "a")',
    }[way]
    program = textwrap.dedent(f"""
        import resource, signal
        from pathlib import Path
        from grpo_cli.engine.checkpoint_store import CheckpointStore
        from grpo_cli.errors import CheckpointError
        import torch
        from safetensors.torch import save_file
        store = CheckpointStore(Path({str(tmp_path)!r}), keep=2)
        store.save(1, lambda folder: (folder / "a").write_bytes(b"small"))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        try:
            store.save(2, lambda folder: {fill})
        except CheckpointError as error:
            print(error)
    """)
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f"no space left for {tmp_path}/step-000002" in outcome.stdout
    assert "the newest checkpoint is that of step 1" in outcome.stdout
    assert "continue with --resume" in outcome.stdout
    assert names(tmp_path) == ["step-000001"]


def test_a_process_killed_while_writing_leaves_no_checkpoint(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from grpo_cli.engine.checkpoint_store import CheckpointStore
        def write(folder):
            (folder / "a").write_bytes(b"half")
            print("writing", flush=True)
            time.sleep(60)
        CheckpointStore(Path({str(tmp_path)!r}), keep=2).save(1, write)
    """)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store = CheckpointStore(tmp_path, keep=2)
    assert store.steps() == []
    store.save(1, write)
    assert names(tmp_path) == ["step-000001"]


def test_resume_finds_the_newest_of_a_run_directory_or_says_what_there_is(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert checkpoint_to_resume(NEWEST, store, print) is None
    path = store.save(4, write)
    assert checkpoint_to_resume(str(tmp_path), store, print) == path
    assert checkpoint_to_resume(str(path), store, print) == path
    with pytest.raises(CheckpointError, match="there is no such folder") as caught:
        checkpoint_to_resume(str(tmp_path / "nowhere"), store, print)
    assert caught.value.hint == f"in {tmp_path / 'checkpoints'} there are step-000004"


def test_checkpoints_that_are_all_damaged_are_not_taken_for_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    (store.save(4, write) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        checkpoint_to_resume(NEWEST, store, print)
    assert store.steps() == [4]


def test_only_what_a_run_wrote_is_refused_and_removed(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("{}")
    refuse_to_overwrite(tmp_path)  # it failed before its first step
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"already holds a run \(metrics.jsonl, checkpoints\)"):
        refuse_to_overwrite(tmp_path)
    remove_run(tmp_path)
    assert names(tmp_path) == ["notes.txt"]


def test_two_runs_cannot_work_in_one_directory(tmp_path: Path) -> None:
    with locked(tmp_path):
        program = (
            "from pathlib import Path; from grpo_cli.engine.run_directory import locked\n"
            f"with locked(Path({str(tmp_path)!r})): pass"
        )
        outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"another run is at work in {tmp_path}" in outcome.stderr
    with locked(tmp_path):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot write to"), locked(tmp_path / "run"):
        pass
