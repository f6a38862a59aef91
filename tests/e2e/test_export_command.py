"""`grpo export` as a user runs it: what it writes computes what was trained."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from e2e.experiment import Experiment, make_experiment
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_start import WarmStart

from grpo_cli.engine.run import run
from grpo_cli.policy.load import load_model
from grpo_cli.recipe.load import load_recipe
from grpo_cli.recipe.schema import LoraSection, ModelSection

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def export(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command from scratch."""
    return subprocess.run(
        [sys.executable, "-m", "grpo_cli", "export", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def experiment(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A run that has trained adapters."""
    experiment = make_experiment(
        tmp_path_factory.mktemp("export"),
        tiny_model_folder,
        model={"lora": {"r": 2}},
        train={"max_steps": 2, "save_steps": 1, "learning_rate": 0.05},
    )
    run(load_recipe(experiment.recipe))
    return experiment


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(5, 15)[None]).logits
    return found


def test_merged_adapters_are_a_whole_model_that_says_the_same(
    experiment: Experiment, tiny_model_folder: Path, tmp_path: Path, warm: WarmStart
) -> None:
    outcome = export("--merge", experiment.output(), tmp_path / "whole")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert outcome.stdout == f"{tmp_path / 'whole'}: merged from {experiment.output() / 'final'}\n"
    section = ModelSection(name_or_path=str(tiny_model_folder), lora=LoraSection(r=2))
    trained = load_model(section, folder=tmp_path, adapters=experiment.output() / "final")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits(whole), logits(trained), rtol=1e-4, atol=1e-4)
    assert (logits(whole) - logits(AutoModelForCausalLM.from_pretrained(tiny_model_folder))).abs().max() > 0.01
    assert AutoTokenizer.from_pretrained(tmp_path / "whole").chat_template
    assert load_model(ModelSection(name_or_path=str(tmp_path / "whole")), folder=tmp_path)
    final = experiment.output() / "final"
    named = warm.run("export", "--merge", "--base", tiny_model_folder, final, tmp_path / "named")
    assert named.returncode == 0, named.stderr
    assert not list(tmp_path.glob(".writing-*"))


def test_adapters_that_tell_nothing_of_the_weights_below_are_merged_with_a_notice(
    experiment: Experiment, tiny_model_folder: Path, tmp_path: Path, warm: WarmStart
) -> None:
    shutil.copytree(experiment.output() / "final", tmp_path / "adapters")
    (tmp_path / "adapters" / "adapter_base.json").unlink()
    shutil.copytree(tiny_model_folder, tmp_path / "moved")
    outcome = warm.run("export", "--merge", "--base", tmp_path / "moved", tmp_path / "adapters", tmp_path / "new")
    assert outcome.returncode == 0, outcome.stderr
    told = f"they were trained on {tiny_model_folder}; --base is {tmp_path / 'moved'}"
    assert outcome.stdout.splitlines()[0] == f"notice: {tmp_path / 'adapters'}: {told}"
    assert not list((tmp_path / "new").glob("adapter_*"))


def test_a_checkpoints_model_is_copied_as_it_is(experiment: Experiment, tmp_path: Path) -> None:
    checkpoint = experiment.output() / "checkpoints" / "step-000001"
    assert export(checkpoint, tmp_path / "copy").returncode == 0
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert names == {path.name for path in (checkpoint / "model").iterdir()}
    assert "adapter_model.safetensors" in names


def test_what_cannot_be_exported_is_told_in_a_line(
    experiment: Experiment, tiny_model_folder: Path, tmp_path: Path, warm: WarmStart
) -> None:
    (tmp_path / "there").mkdir()
    other = build_tiny_model(tmp_path / "other", seed=1)
    for arguments, code, message in (
        ((experiment.output(), tmp_path / "there"), 5, f"{tmp_path / 'there'} is there already"),
        ((tmp_path / "nothing", tmp_path / "new"), 5, f"{tmp_path / 'nothing'} holds no model"),
        (("--merge", tiny_model_folder, tmp_path / "new"), 2, "holds no adapters, so there is nothing to merge"),
        (("--base", "x", experiment.output(), tmp_path / "new"), 2, "add --merge"),
        (("--merge", "--base", "./gone", experiment.output(), tmp_path / "new"), 2, "--base: ./gone does not exist"),
        (
            ("--merge", "--base", other, experiment.output(), tmp_path / "new"),
            2,
            f"--base: {other} has other weights than",
        ),
    ):
        outcome = warm.run("export", *arguments)
        assert (outcome.returncode, message in outcome.stderr) == (code, True), outcome.stderr
        assert "Traceback" not in outcome.stderr
    assert not (tmp_path / "new").exists()
