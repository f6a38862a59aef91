"""What `--model` may name: folders of all kinds, short names of the run's own models, and hub ids."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import build_tiny_model

from grpo_cli.engine.checkpoint_store import BestCheckpoint, CheckpointStore
from grpo_cli.engine.evaluated_model import EvaluatedModel, evaluated_models
from grpo_cli.engine.model_folder import model_folder
from grpo_cli.errors import CheckpointError, ModelError
from grpo_cli.policy.adapters import save_adapters
from grpo_cli.policy.load import load_model
from grpo_cli.policy.weights_below import base_file
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import DatasetSection, LoraSection, ModelSection, Recipe, RewardsSection, TrainSection


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(
        model=ModelSection(
            name_or_path="org/base", tokenizer_name_or_path="org/tokenizer", revision="abc", lora=LoraSection()
        ),
        dataset=DatasetSection(name="rows.jsonl"),
        rewards=RewardsSection(reward_funcs=[]),
        train=TrainSection(output_dir=str(tmp_path / "run")),
    )


def make_model(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", *files):
        (folder / name).write_text("{}")
    return folder


def make_run(folder: Path, *steps: int, best: int | None = None) -> Path:
    store = CheckpointStore(folder / "checkpoints", keep=10)
    for step in steps:
        make_model(store.path(step) / "model", "tokenizer_config.json")
    if best is not None:
        store.mark_best(BestCheckpoint(step=best, metric="eval/reward", value=1.0))
    return folder


def found(recipe: Recipe, *names: object) -> list[EvaluatedModel]:
    output = Path(recipe.train.output_dir)
    loaded = LoadedRecipe(
        recipe=recipe, path=output.parent / "recipe.yaml", folder=output.parent, notices=(), chosen=frozenset()
    )
    return evaluated_models([str(name) for name in names], loaded)


def test_without_a_name_it_is_the_recipes_model_whose_adapters_nobody_trained(recipe: Recipe) -> None:
    (model,) = found(recipe)
    assert model.section == replace(recipe.model, lora=None)
    assert (model.label, model.adapters) == ("org-base", None)


def test_adapters_that_the_recipe_goes_on_from_are_part_of_its_model(recipe: Recipe, tmp_path: Path) -> None:
    settings = {
        "peft_type": "LORA", "base_model_name_or_path": "org/base", "revision": "abc", "r": 4, "lora_alpha": 8,
        "target_modules": ["q_proj"],
    }  # fmt: skip
    make_model(tmp_path / "begun", "adapter_model.safetensors")
    (tmp_path / "begun" / "adapter_config.json").write_text(json.dumps(settings))
    recipe = replace(
        recipe, model=replace(recipe.model, freeze=["lm_head"], lora=LoraSection(adapter_name_or_path="begun"))
    )
    (model,) = found(recipe)
    lora = LoraSection(r=4, alpha=8, target_modules=["q_proj"], adapter_name_or_path="begun")
    assert model.section == replace(recipe.model, lora=lora, freeze=[])
    assert (model.label, model.adapters) == ("begun", tmp_path / "begun")


def test_a_hub_id_comes_with_its_own_tokenizer_and_revision(recipe: Recipe) -> None:
    (model,) = found(recipe, "Qwen/Qwen2-0.5B")
    assert model.label == "Qwen-Qwen2-0.5B"
    assert (model.section.name_or_path, model.section.tokenizer_name_or_path) == ("Qwen/Qwen2-0.5B", None)
    assert (model.section.revision, model.section.lora) == (None, None)


def test_of_a_run_it_is_the_final_model_else_the_best_else_the_newest(recipe: Recipe, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 5, 10)
    assert found(recipe, run)[0].label == "run-step-000010"
    make_run(run.parent / "other", 5, 10, best=5)
    assert found(recipe, run.parent / "other")[0].label == "other-step-000005"
    assert model_folder(run.parent / "other").parent.name == "step-000010", "an export takes the newest"
    make_model(run / "final", "tokenizer_config.json")
    (model,) = found(recipe, run)
    assert (model.label, model.name) == ("run-final", str(run / "final"))
    assert model.section.tokenizer_name_or_path == str(run / "final")


def test_models_of_the_recipes_own_run_have_short_names(recipe: Recipe, tmp_path: Path) -> None:
    make_run(tmp_path / "run", 5, 10, best=5)
    make_model(tmp_path / "run" / "final")
    labels = [model.label for model in found(recipe, "final", "best", "step-000010")]
    assert labels == ["run-final", "run-step-000005", "run-step-000010"]


def test_a_folder_without_a_tokenizer_has_the_recipes(recipe: Recipe, tmp_path: Path) -> None:
    (model,) = found(recipe, make_model(tmp_path / "bare"))
    assert (model.label, model.section.tokenizer_name_or_path) == ("bare", "org/tokenizer")
    assert found(recipe, make_model(tmp_path / "bare" / "model"))[0].label == "model"


def test_adapters_bring_the_model_below_and_their_settings(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    settings = {
        "peft_type": "LORA", "base_model_name_or_path": "org/below", "revision": "def", "r": 4, "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj"], "use_rslora": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (model,) = found(recipe, folder)
    assert (model.section.name_or_path, model.section.revision, model.adapters) == ("org/below", "def", folder)
    assert model.section.lora == LoraSection(r=4, alpha=8, target_modules=["k_proj", "q_proj"], use_rslora=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": "all"}))
    with pytest.raises(ModelError, match="grpo export --merge"):
        found(recipe, folder)


def test_adapters_on_weights_that_are_gone_or_others_are_refused(
    recipe: Recipe, tiny_model_folder: Path, tmp_path: Path
) -> None:
    below = tmp_path / "below"
    shutil.copytree(tiny_model_folder, below)
    section = ModelSection(name_or_path=str(below), lora=LoraSection(r=2))
    save_adapters(load_model(section, folder=tmp_path), tmp_path / "adapters")
    for name, content in base_file(section, tmp_path).items():
        (tmp_path / "adapters" / name).write_bytes(content)
    assert found(recipe, tmp_path / "adapters")[0].section.name_or_path == str(below)
    build_tiny_model(below, seed=1)
    with pytest.raises(ModelError, match=rf"^--model: {below} has other weights than when the adapters in"):
        found(recipe, tmp_path / "adapters")
    shutil.rmtree(below)
    with pytest.raises(
        ModelError, match=rf"^--model: .* were trained on {below}, which is not there any more\n"
    ) as caught:
        found(recipe, tmp_path / "adapters")
    assert "grpo export --merge --base" in str(caught.value.hint)


def test_two_models_of_one_name_are_told_apart(recipe: Recipe, tmp_path: Path) -> None:
    first, second = make_model(tmp_path / "a" / "model-x"), make_model(tmp_path / "b" / "model-x")
    labels = [model.label for model in found(recipe, first, second)]
    assert len(set(labels)) == 2
    assert all(label.startswith("model-x-") for label in labels)
    assert [model.label for model in found(recipe, second, first)] == labels[::-1], "whatever the order"


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "missing.gguf"])
def test_a_path_that_does_not_exist_is_no_hub_id(recipe: Recipe, name: str) -> None:
    with pytest.raises(ModelError, match=f"--model: {name} does not exist"):
        found(recipe, name)


@pytest.mark.parametrize("name", ["best", "final", "step-000009"])
def test_a_short_name_of_nothing_is_no_hub_id(recipe: Recipe, tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ModelError, match=f"--model: {name} does not exist in .*allowed: nothing, for it has no model yet"
    ):
        found(recipe, name)
    make_run(tmp_path / "run", 5, 10)
    with pytest.raises(ModelError, match=f"--model: {name} does not exist in .*allowed: step-000005, step-000010"):
        found(recipe, name)


def test_a_best_checkpoint_that_is_gone_is_not_there(recipe: Recipe, tmp_path: Path) -> None:
    make_run(tmp_path / "run", 5, best=4)
    with pytest.raises(ModelError, match="allowed: step-000005"):
        found(recipe, "best")


def test_a_model_is_not_compared_with_itself(recipe: Recipe, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 5, 10, best=10)
    for twice in (["org/x", "org/x"], ["best", "step-000010"], [run, "step-000010"]):
        with pytest.raises(ModelError, match=r"--model: .* is given twice"):
            found(recipe, *twice)


def test_a_misspelled_path_is_guessed(recipe: Recipe, tmp_path: Path) -> None:
    make_model(tmp_path / "good-model")
    with pytest.raises(ModelError) as caught:
        found(recipe, tmp_path / "god-model")
    assert caught.value.hint == "did you mean `good-model`?"


def test_a_folder_without_a_model_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no model"):
        found(recipe, tmp_path)
