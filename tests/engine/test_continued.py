"""Going on from adapters: what they decide, what is told about them, and what is refused in a line with its key."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build_tiny_model

from grpo_cli.engine.continued import with_adapter_settings
from grpo_cli.errors import ModelError
from grpo_cli.policy.adapters import save_adapters
from grpo_cli.policy.load import load_model
from grpo_cli.policy.quantization import write_quantization
from grpo_cli.policy.weights_below import base_file
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import LoraSection, ModelSection, Recipe

KEY = "model.lora.adapter_name_or_path"


@pytest.fixture
def trained(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """Adapters of a projection."""
    lora = LoraSection(r=2, target_modules=["q_proj"])
    save_adapters(
        load_model(ModelSection(name_or_path=str(tiny_model_folder), lora=lora), folder=tmp_path), tmp_path / "begun"
    )
    return tmp_path / "begun"


def going_on(folder: Path, begun: Path, *chosen: str, **model: Any) -> LoadedRecipe:
    lora = LoraSection(adapter_name_or_path=str(begun))
    return with_adapter_settings(recipe_of(folder, lora, begun.parent, *chosen, **model))


def recipe_of(folder: Path, lora: LoraSection, place: Path, *chosen: str, **model: Any) -> LoadedRecipe:
    """A recipe in some place that says the chosen keys of `model.lora` itself."""
    return LoadedRecipe(
        recipe=Recipe(model=ModelSection(name_or_path=str(folder), lora=lora, **model)),
        path=place / "recipe.yaml",
        folder=place,
        notices=(),
        chosen=frozenset(f"model.lora.{key}" for key in chosen),
    )


def note_base(folder: Path, begun: Path) -> None:
    """Write beside adapters what a run writes there of the weights below."""
    for name, content in base_file(ModelSection(name_or_path=str(folder)), begun).items():
        (begun / name).write_bytes(content)


def write_settings(begun: Path, **changes: Any) -> None:
    path = begun / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_they_say_what_they_are_like(tiny_model_folder: Path, trained: Path) -> None:
    found = going_on(tiny_model_folder, trained)
    assert found.recipe.model.lora is not None
    assert found.recipe.model.lora.r == 2
    assert found.notices == ()


def test_another_model_below_is_told(tiny_model_folder: Path, trained: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", seed=1)
    assert going_on(other, trained).notices == (
        f"{KEY}: they were trained on {tiny_model_folder}; model.name_or_path is {other}",
    )
    link = tmp_path / "link"
    link.symlink_to(tiny_model_folder)
    assert going_on(link, trained).notices == ()
    write_settings(trained, revision="abc")
    assert going_on(tiny_model_folder, trained).notices == (
        f"{KEY}: they were trained on revision abc; model.revision is null",
    )


def test_a_relative_path_and_the_same_weights_elsewhere_are_the_same_model(
    tiny_model_folder: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trained.parent / "below").symlink_to(tiny_model_folder)
    assert going_on(Path("below"), trained).notices == ()
    monkeypatch.chdir(tiny_model_folder.parent)
    assert going_on(Path(tiny_model_folder.name), trained).notices == ()
    note_base(tiny_model_folder, trained)
    shutil.copytree(tiny_model_folder, tmp_path / "moved")
    assert going_on(tmp_path / "moved", trained).notices == ()


@pytest.mark.parametrize("settings", [{"seed": 1}, {"num_layers": 3}])
def test_a_model_that_is_known_to_be_another_is_refused(
    settings: dict[str, int], tiny_model_folder: Path, trained: Path, tmp_path: Path
) -> None:
    """A deeper one would get adapters in its first layers only."""
    note_base(tiny_model_folder, trained)
    other = build_tiny_model(tmp_path / "other", **settings)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=rf"^model\.name_or_path: {other} has other weights than {tiny_model_folder}"):
        going_on(other, trained)


@pytest.mark.parametrize("place", ["run", "run/checkpoints/step-000002", "run/checkpoints/step-000002/model"])
def test_a_run_and_a_checkpoint_are_looked_into_as_an_export_does(
    place: str, tiny_model_folder: Path, trained: Path
) -> None:
    for step, rank in (("1", 7), ("2", 2)):
        folder = trained.parent / "run" / "checkpoints" / f"step-00000{step}" / "model"
        shutil.copytree(trained, folder)
        write_settings(folder, r=rank)
    lora = going_on(tiny_model_folder, trained.parent / place).recipe.model.lora
    assert lora is not None
    assert (lora.r, lora.adapter_name_or_path) == (2, str(trained.parent / place))
    shutil.copytree(trained, trained.parent / "run" / "final")
    write_settings(trained.parent / "run" / "final", r=5)
    found = going_on(tiny_model_folder, trained.parent / "run").recipe.model.lora
    assert found is not None
    assert found.r == 5, "the final model, if there is one"


def test_what_holds_no_adapters_is_told_as_what_it_is(tiny_model_folder: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=rf"^{KEY}: {tiny_model_folder} holds a whole model, and no adapters\n"
    ) as caught:
        going_on(tiny_model_folder, tiny_model_folder)
    assert "model.name_or_path" in str(caught.value.hint)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=rf"^{KEY}: {tmp_path / 'empty'} holds no adapters\n") as caught:
        going_on(tiny_model_folder, tmp_path / "empty")
    assert "train.output_dir" in str(caught.value.hint)


def test_what_is_trained_whole_may_be_named_as_model_freeze_does(
    vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = vision_folder("qwen2_5_vl")
    lora = LoraSection(r=2, modules_to_save=["projector"])
    save_adapters(load_model(ModelSection(name_or_path=str(folder), lora=lora), folder=tmp_path), tmp_path / "begun")
    for names in (["projector"], ["visual.merger"], ["merger.ln_q", "mlp.0", "mlp.2"]):
        section = replace(lora, modules_to_save=names, adapter_name_or_path=str(tmp_path / "begun"))
        found = with_adapter_settings(recipe_of(folder, section, tmp_path, "modules_to_save")).recipe.model.lora
        assert found is not None
        assert found.modules_to_save == [f"model.visual.merger.{name}" for name in ("ln_q", "mlp.0", "mlp.2")]
    section = replace(section, modules_to_save=["merger.ln_q"])
    with pytest.raises(ModelError, match=r'modules_to_save: found the list \["merger.ln_q"\]; the adapters of .* have'):
        with_adapter_settings(recipe_of(folder, section, tmp_path, "modules_to_save"))


def test_other_rounded_weights_below_are_told(tiny_model_folder: Path, trained: Path) -> None:
    below = ModelSection(name_or_path=str(tiny_model_folder), quantization="4bit", bnb_4bit_quant_type="fp4")
    write_quantization(below, trained)
    assert going_on(tiny_model_folder, trained).notices == (
        f"{KEY}: they were trained with model.quantization: 4bit; the recipe's is null",
    )
    assert going_on(tiny_model_folder, trained, quantization="4bit").notices == (
        f"{KEY}: they were trained with model.bnb_4bit_quant_type: fp4; the recipe's is nf4",
    )
    assert going_on(tiny_model_folder, trained, quantization="4bit", bnb_4bit_quant_type="fp4").notices == ()


def test_fewer_layers_than_the_recipe_names_are_told(tiny_model_folder: Path, trained: Path) -> None:
    told = f"{KEY}: they are on 2 layers, and all-linear would be 14; those are trained that have some"
    assert going_on(tiny_model_folder, trained, "target_modules").notices == (told,)
    kinds = ("mlp", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    frozen = [f"layers.{layer}.{kind}" for layer in range(2) for kind in kinds]
    assert going_on(tiny_model_folder, trained, "target_modules", freeze=frozen).notices == ()


@pytest.mark.parametrize("setting", ["r", "lora_alpha", "target_modules"])
def test_settings_that_are_not_there_are_named(setting: str, tiny_model_folder: Path, trained: Path) -> None:
    write_settings(trained, **{setting: None})
    with pytest.raises(ModelError, match=rf"{KEY}: .*adapter_config.json does not say {setting}; allowed"):
        going_on(tiny_model_folder, trained)


def test_weights_in_a_file_that_can_run_code_are_refused(tiny_model_folder: Path, trained: Path) -> None:
    (trained / "adapter_model.safetensors").rename(trained / "adapter_model.bin")
    with pytest.raises(ModelError, match=rf"{KEY}: found adapter_model.bin in .*; allowed: adapter_model.safetensors"):
        going_on(tiny_model_folder, trained)
    (trained / "adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=rf"{KEY}: found no weights in"):
        going_on(tiny_model_folder, trained)


def test_a_head_without_the_embedding_that_it_is_does_not_fit(tmp_path: Path) -> None:
    """As PEFT writes it unless it is told that both are one."""
    tied, untied = (build_tiny_model(tmp_path / str(one), tied=one) for one in (True, False))
    lora = LoraSection(r=2, modules_to_save=["lm_head"])
    save_adapters(load_model(ModelSection(name_or_path=str(untied), lora=lora), folder=tmp_path), tmp_path / "begun")
    section = ModelSection(name_or_path=str(tied), lora=replace(lora, adapter_name_or_path=str(tmp_path / "begun")))
    with pytest.raises(ModelError, match=rf"{KEY}: .* other layers or sizes .*: model.embed_tokens.weight is missing"):
        load_model(section, folder=tmp_path)
