"""`grpo check` and `grpo recipes` as a user sees them: output, streams and exit codes."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from grpo_cli import __version__
from grpo_cli.cli.app import main


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    code: object
    out: str
    err: str


class Command:
    """The installed command, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: str) -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["grpo", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = self.capsys.readouterr()
        return Outcome(code=caught.value.code, out=captured.out, err=captured.err)


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


FINE = """\
recipe is fine: good.yaml
  model    org/model, trained on prompts.jsonl (train)
  rewards  brevity; loss dapo
  length   1 epoch; each step 4 prompts x 8 completions of up to 256 tokens
"""

WRONG = """\
command line: train.seed: found -1; allowed: an integer, at least 0 and at most 9223372036854775807
command line: train.bf16: found "maybe"; allowed: true or false
2 problems; nothing was started
"""


def test_a_fine_recipe_is_summed_up(grpo: Command, recipe_folder: Path) -> None:
    assert grpo("check", "good.yaml") == Outcome(code=0, out=FINE, err="")


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        (["model.lora={}"], "rank 16, alpha 32, on all-linear"),
        (
            [
                "model.lora={r: 8, alpha: 4.5, target_modules: [layers.0.q_proj, layers.1.q_proj, v_proj], use_dora: true}",
                "model.lora.modules_to_save=[norm]",
                "model.lora.dropout=0.1",
            ],
            "DoRA rank 8, alpha 4.5, on q_proj, v_proj; norm trained whole; dropout 0.1",
        ),
        (
            ["model.lora={}", "model.quantization=4bit", "model.bnb_4bit_compute_dtype=bfloat16"],
            "rank 16, alpha 32, on all-linear; on weights in 4 bits (nf4, multiplied in bfloat16)",
        ),
        (
            ["model.lora={adapter_name_or_path: org/adapters}", "model.quantization=8bit"],
            "those of org/adapters; on weights in 8 bits",
        ),
    ],
)
def test_adapters_and_rounding_are_summed_up(
    changes: list[str], shown: str, grpo: Command, recipe_folder: Path
) -> None:
    lines = FINE.splitlines()
    assert grpo("check", "good.yaml", *changes).out.splitlines() == [*lines[:2], f"  adapters {shown}", *lines[2:]]


def test_notices_follow_the_summary(grpo: Command, recipe_folder: Path) -> None:
    outcome = grpo("check", "good.yaml", "model.dtype=bfloat16", "eval.dataset.name=prompts.jsonl")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(FINE)
    lines = outcome.out.removeprefix(FINE).splitlines()
    assert [line.partition(": found ")[0] for line in lines] == ["notice: model.dtype", "notice: eval.dataset"]


def test_vllm_that_is_not_installed_is_noticed(grpo: Command, recipe_folder: Path) -> None:
    grpo.monkeypatch.setitem(sys.modules, "vllm", None)  # no import finds it
    outcome = grpo("check", "good.yaml", "vllm.mode=colocate")
    notice = "notice: vllm.mode: found colocate, but vLLM is not installed here; a run needs it (pip install vllm)"
    assert outcome == Outcome(code=0, out=f"{FINE}  engine   vLLM in the training process\n{notice}\n", err="")


def test_problems_go_to_the_error_stream_with_their_number(grpo: Command, recipe_folder: Path) -> None:
    outcome = grpo("check", "good.yaml", "train.seed=-1", "train.bf16=maybe")
    assert outcome == Outcome(code=2, out="", err=WRONG)


def test_print_shows_a_recipe_that_can_be_checked_again(grpo: Command, recipe_folder: Path) -> None:
    printed = grpo("check", "good.yaml", "train.seed=7", "--print").out
    assert yaml.safe_load(printed)["train"]["seed"] == 7
    Path("printed.yaml").write_text(printed)
    assert grpo("check", "printed.yaml", "--print").out == printed


def test_a_traceback_is_shown_only_with_debug(grpo: Command, recipe_folder: Path) -> None:
    assert "Traceback" not in grpo("check", "none.yaml").err
    outcome = grpo("--debug", "check", "none.yaml")
    assert outcome.code == 2
    assert "Traceback" in outcome.err
    assert outcome.err.endswith("none.yaml: does not exist; allowed: a YAML file\n1 problem; nothing was started\n")


def test_a_command_without_its_recipe_is_a_usage_error(grpo: Command) -> None:
    outcome = grpo("check")
    assert outcome.code == 2
    assert "Missing argument 'RECIPE'" in outcome.err


def test_version_is_shown(grpo: Command) -> None:
    assert grpo("--version") == Outcome(code=0, out=f"grpo {__version__}\n", err="")


@pytest.mark.parametrize("command", [(), ("check",), ("recipes",)])
def test_help_ends_with_examples(command: tuple[str, ...], grpo: Command) -> None:
    outcome = grpo(*command, "--help")
    assert outcome.code == 0
    assert "Examples:\n" in outcome.out


def test_recipes_are_listed_with_the_first_line_of_their_header(grpo: Command, recipe_folder: Path) -> None:
    Path("recipes").mkdir()
    Path("recipes/long_name.yaml").write_text("# Short answers.\n# More.\nrun_name: a\n")
    Path("recipes/b.yaml").write_text("run_name: b\n")
    listed = "recipes/b.yaml\nrecipes/long_name.yaml  Short answers.\n"
    assert grpo("recipes") == Outcome(code=0, out=listed, err="")


def test_a_folder_without_recipes_is_an_error(grpo: Command, recipe_folder: Path) -> None:
    expected = (
        f"error: no recipes in {recipe_folder}/none\n  hint: name a folder with YAML files: grpo recipes FOLDER\n"
    )
    assert grpo("recipes", "none") == Outcome(code=1, out="", err=expected)
