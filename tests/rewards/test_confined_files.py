"""What a confined process can write, and which folders it can read."""

import signal
from pathlib import Path

import pytest
from confined_processes import LIMITS, assert_refused, run

from rewards.confinement.choice import examine
from rewards.confinement.layers import Layer, environment, library_folders, readable_paths
from rewards.confinement.process import End, Finished
from rewards.confinement.sandbox import Sandbox


def is_full(finished: Finished) -> bool:
    """Whether it was ended for what it wrote, or its folder had no room for it."""
    return finished.end is End.DISK or b"No space left on device" in finished.errors


def test_the_disk_is_not_filled(sandbox: Sandbox) -> None:
    grow = "import itertools\nfor n in itertools.count():\n    open(f'file{n}', 'wb').write(b'x' * (1 << 19))"
    assert is_full(run(sandbox, grow))
    one = run(sandbox, "open('file', 'wb').write(b'x' * (1 << 24))")
    assert (one.end, one.code) in {(End.EXIT, 1), (End.SIGNAL, signal.SIGXFSZ)}


@pytest.mark.parametrize(
    "body",
    [
        "file = open('file', 'wb', buffering=0)\n    os.remove('file')\n    file.write(b'x' * (1 << 19))\n    kept.append(file)",
        "open(f'file{number}', 'wb').close()",
    ],
    ids=["removed", "empty"],
)
def test_files_that_have_no_name_or_no_content_fill_no_disk(sandbox: Sandbox, body: str) -> None:
    if sandbox.layer is Layer.BUBBLEWRAP and "remove" not in body:
        pytest.skip("bwrap limits the bytes of a folder in memory, not its files")
    source = (
        f"import os, time\nkept = []\nfor number in range(50_000):\n    {body}\n    if number > 10: time.sleep(0.002)"
    )
    assert is_full(run(sandbox, source, seconds=8))


def test_room_cannot_be_taken_without_writing(sandbox: Sandbox) -> None:
    flags = "os.O_TMPFILE | os.O_WRONLY"
    assert_refused(sandbox, [f"os.open('.', {flags})", "os.posix_fallocate(os.open('new', 65), 0, 1 << 19)"])


def test_only_folders_of_libraries_are_left_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries, others, home = tmp_path / "libraries", tmp_path / "others", tmp_path / "home"
    for folder in (libraries, others, home, work := home / "work"):
        folder.mkdir()
        (folder / "libx.so.1").touch()
    (others / "libx.so.1").rename(others / "notes.txt")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    listed = [libraries, others, home, work, tmp_path, Path("/"), tmp_path / "missing"]
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(["", ".", *map(str, listed)]))
    assert library_folders() == [str(libraries)]
    assert environment("")["LD_LIBRARY_PATH"] == str(libraries)
    assert not {str(each) for each in listed[1:]} & set(readable_paths())


def test_a_working_folder_that_is_left_readable_is_said_to_be_open(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(readable_paths()[0]).resolve())
    assert examine(Sandbox(layer=sandbox.layer, limits=LIMITS)) == ("files",)
    assert sandbox.layer is not Layer.LIMITS
