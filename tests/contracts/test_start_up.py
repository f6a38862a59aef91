"""The command line starts light: neither help nor a check loads torch and its company, nor runs a user's code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from optional_packages import needs_vllm

HEAVY = {"torch", "transformers", "datasets", "accelerate", "numpy", "scipy", "pandas", "peft", "wandb"}

PROBE = """\
import json, sys
sys.argv = ["grpo", *sys.argv[1:]]
from grpo_cli.cli.app import main
try:
    main()
except SystemExit as end:
    print(json.dumps({"code": end.code, "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""

RECIPE = """\
model: {name_or_path: org/model}
dataset: {name: prompts.jsonl}
rewards: {reward_funcs: [my_rewards.score]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 8)
    (tmp_path / "my_rewards.py").write_text("import torch\ndef score(): ...\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[int, set[str]]:
    """Give the command's exit code, and the packages that it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    end = json.loads(done.stdout.splitlines()[-1])
    return end["code"], set(end["modules"])


@pytest.mark.parametrize(
    "arguments", [("--help",), ("check", "--help"), ("train", "--help"), ("eval", "--help"), ("check", "recipe.yaml")]
)
def test_nothing_heavy_is_imported(arguments: tuple[str, ...], folder: Path) -> None:
    code, modules = run(folder, *arguments)
    assert code == 0
    assert not HEAVY & modules
    assert "my_rewards" not in modules


@needs_vllm
def test_a_server_without_a_recipe_starts_without_what_trains(folder: Path) -> None:
    """It comes as far as the model's folder, in which there is none; vLLM is loaded by its own process."""
    code, modules = run(folder, "vllm-serve", "--model", str(folder))
    assert code == 2
    assert not {"transformers", "datasets", "accelerate", "peft", "vllm"} & modules
