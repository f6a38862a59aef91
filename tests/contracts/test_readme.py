"""What the README says is true: its examples run, its recipes check, its tables are the code's."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import grpo_cli.errors
from grpo_cli.cli.app import app
from grpo_cli.objective.settings import LossType
from grpo_cli.recipe import reference
from grpo_cli.recipe.imports import locate
from grpo_cli.recipe.load import load_recipe
from grpo_cli.recipe.schema import RewardsSection
from grpo_cli.recipe.schema.rewards import RESERVED_COLUMNS, RewardFunction
from grpo_cli.scoring.functions import load_rewards
from grpo_cli.scoring.runtime import RewardScorer
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.telemetry import names
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt, PromptId

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PLAIN_RECIPE = "model: {name_or_path: org/model}\ndataset: {name: org/prompts}\n"


def blocks(language: str) -> list[str]:
    return [content for found, content in BLOCKS if found == language]


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the README's reward functions and the data that its recipe names."""
    (tmp_path / "my_rewards.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n' * 8, encoding="utf-8")
    return tmp_path


def test_the_first_two_commands_are_the_quickstart_and_the_tests() -> None:
    assert BLOCKS[:2] == [("bash", "scripts/quickstart\n"), ("bash", "scripts/test\n")]


def test_commands_exist() -> None:
    commands = {line.split()[1] for block in blocks("bash") for line in block.splitlines() if line.startswith("grpo ")}
    known = getattr(get_command(app), "commands", {})
    assert commands
    assert commands <= set(known)


@pytest.mark.parametrize("number", range(len(blocks("yaml"))))
def test_a_recipe_of_the_readme_is_fine(folder: Path, number: int) -> None:
    recipe = blocks("yaml")[number]
    (folder / "recipe.yaml").write_text(recipe if "model:\n" in recipe else PLAIN_RECIPE + recipe, encoding="utf-8")
    assert load_recipe(folder / "recipe.yaml").notices == ()  # what is wrong would be raised


def score(folder: Path, texts: list[str], *entries: RewardFunction, progress: float = 0.0, **columns: Any) -> Any:
    """Score string completions of one prompt, as a run would."""
    completions = tuple(
        Completion(
            index=index,
            ids=(1,),
            logps=None,  # type: ignore[arg-type]  # rewards do not get them
            text=text,
            finish_reason=FinishReason.STOP,
            policy_version=PolicyVersion(0),
        )
        for index, text in enumerate(texts)
    )
    row = {"prompt": "Ask", **columns}
    prompt = Prompt(uid=PromptId("0:0"), ids=(1,), text="Ask", messages=None, row=row)
    rewards = load_rewards(RewardsSection(reward_funcs=list(entries)), folder=folder, device="cpu")
    scorer = RewardScorer(rewards)
    try:
        state = TrainerState(global_step=0, max_steps=10, epoch=0.0, progress=progress)
        return scorer.score([Group(prompt=prompt, completions=completions)], state)
    finally:
        scorer.close()


def rewards_of(scores: Any) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in scores.groups[0].rewards.tolist()]


def test_the_first_reward_takes_its_parameter(folder: Path) -> None:
    by_default = score(folder, ["x" * 18, "x" * 25], RewardFunction(path="my_rewards.close_to"))
    assert rewards_of(by_default) == [[-2.0], [-5.0]]
    changed = score(folder, ["x" * 18], RewardFunction(path="my_rewards.close_to", parameters={"target": 50}))
    assert rewards_of(changed) == [[-32.0]]


def test_the_reward_of_one_task_leaves_others_alone_and_logs(folder: Path) -> None:
    entry = RewardFunction(path="my_rewards.correct")
    scores = score(folder, [" 7", "8"], entry, task="arithmetic", ground_truth="7")
    assert rewards_of(scores) == [[1.0], [0.0]]
    assert scores.groups[0].extras == {("correct", "answer"): ("7", "8")}
    assert scores.metrics["solved"].result() == 0.5
    other = score(folder, ["7"], entry, task="poetry", ground_truth="7")
    assert other.groups[0].rewards.isnan().all()
    assert "solved" not in other.metrics


def test_the_reward_object_keeps_its_state(folder: Path) -> None:
    entry = RewardFunction(path="my_rewards.Curriculum", parameters={"start": 10, "end": 2})
    assert rewards_of(score(folder, ["x" * 10, "x" * 11], entry)) == [[1.0], [0.0]]
    assert rewards_of(score(folder, ["x" * 6, "x" * 7], entry, progress=0.5)) == [[1.0], [0.0]]
    (reward,) = load_rewards(RewardsSection(reward_funcs=[entry]), folder=folder, device="cpu")
    reward.source.load_state_dict({"allowed": 3})
    state = TrainerState(global_step=0, max_steps=10, epoch=0.0, progress=0.0)
    assert reward.function(completions=["xxx", "xxxx"], trainer_state=state) == [1.0, 0.0]
    assert RewardScorer([reward]).state_dict() == {"Curriculum": {"allowed": 3}}


def test_the_async_reward_is_awaited(folder: Path) -> None:
    scores = score(folder, ["yes please", "no"], RewardFunction(path="my_rewards.judged"))
    assert rewards_of(scores) == [[1.0], [0.0]]


def test_generated_tables_are_up_to_date() -> None:
    assert reference.main([str(README), "--check"]) == 0
    assert names.main([str(README), "--check"]) == 0


def test_the_table_of_losses_has_each_loss_once() -> None:
    assert re.findall(r"^\| `(\w+)` \|.*\|$", section("Losses"), re.MULTILINE)[: len(LossType)] == list(LossType)


def test_arguments_of_rewards_are_all_explained() -> None:
    table = section("Rewards").partition("\n| argument |")[2].partition("\n\n")[0]
    explained = set(
        re.findall(r"`(\w+)(?:\([^`]*\))?`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))
    )
    assert explained == RESERVED_COLUMNS - {"prompt", "completion"}


def test_exit_codes_are_those_of_the_errors() -> None:
    classes = [value for value in vars(grpo_cli.errors).values() if isinstance(value, type)]
    codes = {kind.exit_code for kind in classes if issubclass(kind, grpo_cli.errors.GrpoError)}
    rows = re.findall(r"^\| ([\d, ]+) \|", section("Resuming, signals, exit codes"), re.MULTILINE)
    others = {0, grpo_cli.errors.DOES_NOT_FIT, 129, 130, 143}
    assert {int(code) for row in rows for code in row.split(",")} == codes | others


def test_every_recipe_key_and_dotted_path_in_the_text_exists(tmp_path: Path) -> None:
    sections = re.findall(r"^#### `(\w+)`\n(.*?)(?=^#|\Z)", reference.key_table(), re.MULTILINE | re.DOTALL)
    keys = {f"{title}.{key}" for title, table in sections for key in re.findall(r"^\| `(\w+)`", table, re.MULTILINE)}
    prefixes = "|".join(title for title, _ in sections)
    named = set(re.findall(rf"`((?:{prefixes})\.[\w.]+)(?=[:`= ])", TEXT))
    titles = set(re.findall(r"^#### `(.+)`$", reference.key_table(), re.MULTILINE))
    unknown = {name for name in named - keys - titles if locate(name, tmp_path) is not None}
    assert "train.prompts_per_step" in named
    assert unknown == set()


def test_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    }
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", TEXT)
    assert targets
    for target in targets:
        assert target[1:] in headings if target.startswith("#") else (ROOT / target).exists(), target
