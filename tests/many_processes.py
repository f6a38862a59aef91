"""Runs in several real processes, launched by torchrun."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_server import free_port

PROGRAM = """
import json, os, sys
from pathlib import Path
from grpo_cli.engine.run import run
from grpo_cli.recipe.load import load_recipe
for recipe, overrides, resume in json.loads(sys.argv[1]):
    run(load_recipe(Path(recipe), [one.replace("{rank}", os.environ["RANK"]) for one in overrides]), resume=resume)
"""

Job = tuple[Path, Mapping[str, object], str | None]
"""Recipe, changes, and what `--resume` says."""


def overrides(changes: Mapping[str, object]) -> list[str]:
    return [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in changes.items()]


def launch(count: int, jobs: Sequence[Job], folder: Path) -> subprocess.CompletedProcess[str]:
    """Do some runs one after another in the same processes. `{rank}` in a change is the process's number."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    told = [(str(recipe), overrides(changes), resume) for recipe, changes, resume in jobs]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    return subprocess.run(
        [*torchrun, "--master-port", str(free_port()), str(program), json.dumps(told)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def train_in(count: int, jobs: Sequence[Job], folder: Path) -> None:
    """Do some runs, all of which succeed."""
    outcome = launch(count, jobs, folder)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
