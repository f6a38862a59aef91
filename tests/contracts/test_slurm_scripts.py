"""The batch scripts: clean shell, and what their headers say is what the README shows and the recipes want."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts/slurm"
BATCH_SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
SETTING = re.compile(r"GRPO_[A-Z_]+")

each_batch_script = pytest.mark.parametrize("path", BATCH_SCRIPTS, ids=lambda path: path.stem)


def header(path: Path) -> str:
    """The comment at the top."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))])


def code(path: Path) -> str:
    """Everything but comments."""
    return "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(
        ["shellcheck", "--shell=bash", "--external-sources", *map(str, FOLDER.iterdir())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""


def test_the_shell_understands_what_is_sourced() -> None:
    for name in ("job", "servers"):
        subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


@each_batch_script
def test_a_job_is_warned_and_can_be_queued_again(path: Path) -> None:
    options = re.findall(r"^#SBATCH (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert "--requeue" in options
    assert any(option.startswith("--signal=B:USR1@") for option in options)
    assert "--open-mode=append" in options, "what a job printed in an earlier life stays"


def test_every_setting_is_explained_and_every_explained_setting_exists() -> None:
    files = [*BATCH_SCRIPTS, FOLDER / "job", FOLDER / "servers"]
    explained = {name for path in files for name in SETTING.findall(header(path))}
    read = {name for path in files for name in SETTING.findall(code(path))}
    assert explained == read


def test_the_readme_shows_every_batch_script() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"sbatch scripts/slurm/{path.name} recipes/" in text for path in BATCH_SCRIPTS)
