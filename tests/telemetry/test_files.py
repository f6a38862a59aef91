"""metrics.jsonl and whole-file writes: torn lines, resume, disks without room."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_cli.errors import TrainingError
from grpo_cli.telemetry.files import JsonLines, disk_errors, write_whole


def test_appended_objects_are_on_disk_at_once_in_the_order_of_their_keys(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "run" / "metrics.jsonl")
    lines.append({"step": 1, "reward": -0.5, "kl": None})
    assert lines.path.read_text() == '{"step": 1, "reward": -0.5, "kl": null}\n'
    lines.append({"step": 2, "reward": 1})
    assert lines.records() == [{"step": 1, "reward": -0.5, "kl": None}, {"step": 2, "reward": 1}]


def test_a_torn_last_line_is_no_record_and_goes_at_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "rew')
    lines = JsonLines(path)
    assert lines.records() == [{"step": 1}, {"step": 2}]
    lines.keep(lambda record: record["step"] <= 2)
    lines.append({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize("cut", range(1, 40))
def test_wherever_a_kill_cuts_the_file_the_whole_lines_survive(tmp_path: Path, cut: int) -> None:
    whole = b'{"step": 1, "x": 0.1}\n{"step": 2, "x": 0.2}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(whole[:cut])
    lines = JsonLines(path)
    lines.keep(lambda record: record["step"] <= 1)
    expected = b'{"step": 1, "x": 0.1}\n' if cut >= len(b'{"step": 1, "x": 0.1}') else b""
    assert path.read_bytes() == expected


def test_kept_lines_are_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = '{"step": 1, "x": 1e-07, "y": 0.30000000000000004}\n'
    path.write_text(kept + '{"step": 2}\n')
    JsonLines(path).keep(lambda record: record["step"] == 1)
    assert path.read_text() == kept


def test_a_file_that_is_not_there_has_no_records_and_nothing_to_keep(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.keep(lambda _: True)
    assert lines.records() == []
    assert not lines.path.exists()


def test_nan_is_refused_because_it_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        JsonLines(tmp_path / "metrics.jsonl").append({"loss": float("nan")})


def test_a_whole_write_replaces_the_file_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "000001.parquet"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_path_that_cannot_be_written_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder should be")
    with pytest.raises(TrainingError) as caught:
        write_whole(tmp_path / "runs" / "x.parquet", b"content")
    assert caught.value.message == f"cannot write {tmp_path / 'runs' / 'x.parquet'}: File exists"
    assert caught.value.hint == "make the folder writable, or set train.output_dir to another one"


def _run_with_file_size_limit(code: str, folder: Path) -> str:
    """Run code in a process that may write at most 4096 bytes to a file, as on a disk that is full after that."""
    prologue = """
        import resource, signal, sys
        from pathlib import Path
        from grpo_cli.errors import TrainingError
        from grpo_cli.telemetry.files import JsonLines, write_whole
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        folder = Path(sys.argv[1])
    """
    program = textwrap.dedent(prologue) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_a_line_that_finds_no_room_is_an_error_and_leaves_the_file_whole(tmp_path: Path) -> None:
    output = _run_with_file_size_limit(
        """
        lines = JsonLines(folder / "metrics.jsonl")
        for step in range(1, 100):
            try:
                lines.append({"step": step, "padding": "x" * 1000})
            except TrainingError as error:
                print(error)
                break
        """,
        tmp_path,
    )
    assert output == (
        f"no room to write {tmp_path / 'metrics.jsonl'}: File too large\n"
        "  hint: free some space and continue with --resume; the checkpoints and records written so far are whole\n"
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert all(line.endswith("\n") for line in lines)
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_whole_write_that_finds_no_room_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.parquet", b"old")
    output = _run_with_file_size_limit(
        """
        try:
            write_whole(folder / "a.parquet", b"x" * 10_000)
        except TrainingError as error:
            print(error.message)
        """,
        tmp_path,
    )
    assert output == f"no room to write {tmp_path / 'a.parquet'}: File too large\n"
    assert (tmp_path / "a.parquet").read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.parquet"]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no /dev/full")
def test_a_full_disk_says_so(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.path.symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"no room to write .*metrics.jsonl: No space left on device"):
        lines.append({"step": 1})


@pytest.mark.parametrize("read", [lambda lines: lines.records(), lambda lines: lines.keep(lambda _: True)])
def test_a_file_that_cannot_be_read_is_an_error_with_a_hint(
    tmp_path: Path, read: Callable[[JsonLines], object]
) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.path.mkdir()
    with pytest.raises(TrainingError) as caught:
        read(lines)
    assert caught.value.message == f"cannot read {lines.path}: Is a directory"
    assert caught.value.hint == "make the folder writable, or set train.output_dir to another one"


def test_a_write_that_fails_when_the_file_is_closed_is_an_error_with_a_hint(tmp_path: Path) -> None:
    """Network file systems may report a full quota only then; here another one has closed the file: EBADF."""
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"step": 1})
    (descriptor,) = (link for link in Path("/proc/self/fd").iterdir() if link.resolve() == lines.path.resolve())
    os.close(int(descriptor.name))
    with pytest.raises(TrainingError, match=r"cannot write .*metrics.jsonl: Bad file descriptor"):
        lines.close()
    lines.append({"step": 2})
    assert [record["step"] for record in lines.records()] == [1, 2]
    lines.close()


def test_an_error_without_a_reason_of_the_system_tells_its_own(tmp_path: Path) -> None:
    """Libraries raise OSError with nothing but a text."""
    with pytest.raises(TrainingError, match=r"cannot write .*x: the library's words"), disk_errors(tmp_path / "x"):
        raise OSError("the library's words")
