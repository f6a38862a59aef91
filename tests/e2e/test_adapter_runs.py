"""Whole runs that train adapters of every kind: ratios, resumption, and going on from another run's adapters."""

import shutil
from pathlib import Path

import pytest
import torch
from e2e.experiment import assert_same_run, make_experiment, records, weights
from e2e.test_resume import stop_at_every_step, train
from safetensors.torch import load_file
from tiny_models import build_tiny_model

from grpo_cli.engine.continued import with_adapter_settings
from grpo_cli.errors import CheckpointError, DataError, ModelError
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

EVERYTHING = {
    "model.lora.r": 2,
    "model.lora.use_dora": "true",
    "model.lora.dropout": 0.2,
    "model.lora.modules_to_save": "[embed_tokens, norm]",
}


def test_a_run_with_everything_is_resumed_bit_for_bit(tiny_model_folder: Path, tmp_path: Path) -> None:
    """It goes on from adapters, with a reference that stays where these were, whatever becomes of their folder."""
    experiment = make_experiment(
        tmp_path,
        tiny_model_folder,
        grpo={"num_generations": 2, "steps_per_generation": 2, "num_iterations": 2, "beta": 0.05},
        train={"save_steps": 2},
    )
    train(experiment, "first", {**EVERYTHING, "train.max_steps": 1})
    first = experiment.output("first") / "final"
    changes = {"model.lora.adapter_name_or_path": first, "model.lora.dropout": 0.2}
    train(experiment, "whole", changes)
    stop_at_every_step(experiment, "stopped", changes, after=lambda: first.rename(first.with_name("moved")))
    first.with_name("moved").rename(first)
    assert_same_run(experiment.output("stopped"), experiment.output("whole"))
    train(experiment, "without", {**changes, "model.lora.dropout": 0, "train.max_steps": 3})
    told = [record["kl"] for record in records(experiment.output("without"))]
    assert told[0] == pytest.approx(0, abs=1e-5), "the reference is the policy of the start"
    assert told[2] > 1e-3
    saved = experiment.output("whole") / "checkpoints" / "step-000006" / "model"
    assert not (saved / "model.safetensors").exists()
    assert weights(experiment.output("whole")).keys() == load_file(first / "adapter_model.safetensors").keys()


def test_dropout_never_moves_the_ratio(tiny_model_folder: Path, tmp_path: Path) -> None:
    """With weights that do not move, old log-probabilities of other passes and of the same one are the present ones to the last bit."""
    experiment = make_experiment(
        tmp_path,
        tiny_model_folder,
        grpo={"num_generations": 2, "steps_per_generation": 2, "num_iterations": 2, "epsilon": 1e-9},
        model={"lora": {"r": 2, "dropout": 0.5, "modules_to_save": ["embed_tokens"]}},
    )
    train(experiment, "still", {"train.learning_rate": 1e-30})
    train(experiment, "moving")
    for record in records(experiment.output("still")):
        assert [record[f"clip_ratio/{name}"] for name in ("low_mean", "high_mean", "region_mean")] == [0, 0, 0]
    moved = [record["clip_ratio/region_mean"] > 0 for record in records(experiment.output("moving"))]
    assert moved == [False, True, True, True, False, True], "the ratio of later steps is moved by the weights"


def test_dropout_trains_other_weights_and_the_same_with_any_token_budget(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    experiment = make_experiment(
        tmp_path, tiny_model_folder, model={"lora": {"r": 2}}, train={"max_steps": 3, "learning_rate": 0.001}
    )
    for name, changes in {
        "without": {},
        "with": {"model.lora.dropout": 0.3},
        "at once": {"model.lora.dropout": 0.3, "train.micro_batch_tokens": 4096},
    }.items():
        train(experiment, name, changes)
    without, small, large = (weights(experiment.output(name)) for name in ("without", "with", "at once"))
    assert any(not torch.allclose(one, small[name], atol=1e-4) for name, one in without.items())
    for name, one in large.items():
        torch.testing.assert_close(small[name], one, rtol=1e-4, atol=2e-5, msg=name)


def test_what_contradicts_adapters_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder, train={"max_steps": 1})
    train(experiment, "first", {"model.lora.r": 2, "model.lora.target_modules": "[q_proj]"})
    final = experiment.output("first") / "final"
    going_on = {"model.lora.adapter_name_or_path": final}
    for key, value, found in (
        ("r", 16, "16"),
        ("use_dora", "true", "true"),
        ("target_modules", "[q_proj, v_proj]", r'the list \["q_proj", "v_proj"\]'),
    ):
        with pytest.raises(ModelError, match=rf"model\.lora\.{key}: found {found}; the adapters of .* have"):
            train(experiment, "run", {**going_on, f"model.lora.{key}": value})
    train(experiment, "run", {**going_on, "model.lora.target_modules": "[q_proj]", "model.lora.r": 2})
    with pytest.raises(ModelError, match=r"model\.name_or_path: .* holds adapters") as caught:
        train(experiment, "other", {"model.name_or_path": final})
    assert "model.lora.adapter_name_or_path" in str(caught.value.hint)


def test_a_run_goes_on_from_the_directory_of_another_and_knows_the_weights_below(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """As from its final model, with nothing to tell of a model that has only another path; and on no other weights."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    experiment = make_experiment(
        tmp_path, Path("model"), model={"lora": {"r": 2}}, grpo={"beta": 0.05}, train={"max_steps": 2, "save_steps": 1}
    )
    train(experiment, "first")
    first = experiment.output("first")
    train(experiment, "from its model", {"model.lora.adapter_name_or_path": first / "final"})
    train(experiment, "from the run", {"model.lora.adapter_name_or_path": first})
    assert_same_run(experiment.output("from the run"), experiment.output("from its model"))
    going_on = load_recipe(experiment.recipe, [f"model.lora.adapter_name_or_path={first}"])
    assert with_adapter_settings(going_on).notices == ()
    build_tiny_model(folder, seed=1)
    for resumed in ({}, {"model.lora.adapter_name_or_path": first}):
        with pytest.raises(CheckpointError, match=r"^--resume: model\.name_or_path: model has other weights than when"):
            train(
                experiment, "from the run" if resumed else "first", {**resumed, "train.max_steps": 3}, resume="newest"
            )
    with pytest.raises(ModelError, match=r"^model\.name_or_path: model has other weights than when"):
        train(experiment, "again", {"model.lora.adapter_name_or_path": first})


def test_names_of_parts_are_looked_up_before_any_row_is_read(tiny_model_folder: Path, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder, dataset={"name": "my_rows.read"})
    (tmp_path / "my_rows.py").write_text("def read():\n    raise RuntimeError('rows were asked for')\n")
    for changes in (
        {"model.freeze": "[lm_hed]"},
        {"train.learning_rates.lm_hed": 0.1},
        {"model.lora.target_modules": "[q]"},
    ):
        (name,) = changes
        with pytest.raises(ModelError, match=name.removesuffix(".lm_hed")):
            train(experiment, "never", changes)
    with pytest.raises(DataError, match="rows were asked for"):
        train(experiment, "never")
