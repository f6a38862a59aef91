"""Datasets with images, from the recipe on: what is loaded for them, what is told of them, and what they are told apart by."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from e2e.experiment import Experiment, make_experiment
from PIL import Image

from grpo_cli.engine.collecting import prompt_checksum
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.held_out import HeldOut, load_all_held_out, load_scorers
from grpo_cli.engine.prompts import LoadedPrompts, load_prompts
from grpo_cli.engine.reward_trial import SavedCompletion, score_completions
from grpo_cli.engine.vision import VisionLoader
from grpo_cli.errors import DataError
from grpo_cli.policy.load import load_tokenizer
from grpo_cli.recipe.load import LoadedRecipe, load_recipe
from grpo_cli.types import Prompt, PromptId

BRIGHT = """

def bright(image, **_):
    return [None if one is None else one.getpixel((0, 0)) / 255 for one in image]
"""


@pytest.fixture
def experiment(vision_folder: Callable[[str], Path], tmp_path: Path) -> Experiment:
    """A recipe whose rows have images in files beside them; the third row has none."""
    made = make_experiment(
        tmp_path,
        vision_folder("qwen2_5_vl"),
        dataset={"name": "rows/data.jsonl", "conversational": True},
        rewards={"reward_funcs": ["my_rewards.bright"]},
        eval={"dataset": {"name": "rows/data.jsonl", "conversational": True}},
    )
    (tmp_path / "rows").mkdir()
    for number, level in enumerate((0, 51)):
        Image.fromarray(np.full((16, 16), level, dtype=np.uint8)).save(tmp_path / "rows" / f"{number}.png")
    rows: list[dict[str, Any]] = [
        {"prompt": f"How bright is {number}?", "image": f"{number}.png"} for number in range(2)
    ]
    rows.append({"prompt": "How bright is nothing?", "image": None})
    write_rows(tmp_path, rows)
    with (tmp_path / "my_rewards.py").open("a") as file:
        file.write(BRIGHT)
    return made


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "rows" / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(loaded: LoadedRecipe) -> tuple[LoadedPrompts, VisionLoader]:
    recipe, folder = loaded.recipe, loaded.folder
    vision = VisionLoader(recipe.model, folder=folder)
    tokenizer = load_tokenizer(recipe.model, folder=folder)
    return load_prompts(recipe.dataset, tokenizer, vision=vision, folder=folder, seed=0), vision


def held_out(loaded: LoadedRecipe) -> HeldOut:
    vision = VisionLoader(loaded.recipe.model, folder=loaded.folder)
    tokenizer = load_tokenizer(loaded.recipe.model, folder=loaded.folder)
    scorers = load_scorers(loaded, Processes(bf16=False))
    return load_all_held_out(loaded, tokenizer, vision, scorers)[0]


def test_images_are_read_from_beside_the_data_and_told_of(experiment: Experiment) -> None:
    prompts, vision = load(load_recipe(experiment.recipe, []))
    assert vision.loaded is not None
    assert "images: 2 of 3 prompts, 1 each; image tokens of a prompt: mean 4.0, up to 4" in prompts.lines
    drawn = {prompt.row["prompt"]: prompt.images for prompt in prompts.source.take(3)}
    files = [(experiment.folder / "rows" / f"{number}.png").read_bytes() for number in range(2)]
    assert drawn == {
        "How bright is 0?": (files[0],),
        "How bright is 1?": (files[1],),
        "How bright is nothing?": (),
    }


def test_what_is_tried_before_training_is_tried_on_an_image(experiment: Experiment) -> None:
    path = experiment.folder / "rows" / "data.jsonl"
    write_rows(experiment.folder, [json.loads(line) for line in reversed(path.read_text().splitlines())])
    prompts, _ = load(load_recipe(experiment.recipe, []))
    assert prompts.first.images == ()
    assert prompts.probe.row["prompt"] == "How bright is 1?"
    assert len(prompts.probe.images) == 1


def test_nothing_for_images_is_loaded_for_text(experiment: Experiment) -> None:
    write_rows(experiment.folder, [{"prompt": "How bright?"}] * 2)
    assert load(load_recipe(experiment.recipe, []))[1].loaded is None


@pytest.mark.parametrize("streaming", [False, True])
def test_images_that_no_prompt_shows_are_told_of(
    experiment: Experiment, tiny_model_folder: Path, streaming: bool
) -> None:
    rows = [{"prompt": "How bright?", "photo": Image.new("L", (8, 8))}] * 4
    Dataset.from_list(rows).to_parquet(str(experiment.folder / "rows.parquet"))
    changes = [f"dataset.streaming={streaming}", "dataset.name=rows.parquet", "train.max_steps=1"]
    changes += ["rewards.reward_funcs=[my_rewards.few_letters]", "eval=null"]
    sees = load_recipe(experiment.recipe, [*changes[:-1], "eval.dataset.name=rows.parquet"])
    told = "images of column `photo`: no prompt shows them; `dataset.columns: {image: photo}` would, "
    assert load(sees)[0].lines[0].startswith(told)
    told = "evaluation images of column `photo`: no prompt shows them; `eval.dataset.columns: {image: photo}` would, "
    assert held_out(sees).lines[0].startswith(told)
    mapped, vision = load(load_recipe(experiment.recipe, [*changes, "dataset.columns={image: photo}"]))
    assert vision.loaded is not None
    reads = load_recipe(experiment.recipe, [*changes, f"model.name_or_path={tiny_model_folder}"])
    named = load_recipe(experiment.recipe, [*changes, "dataset.columns={photo: photo}"])
    for lines in (mapped.lines, load(reads)[0].lines, load(named)[0].lines):
        assert not [line for line in lines if "no prompt shows" in line]


def test_a_model_that_reads_text_only_is_refused(experiment: Experiment, tiny_model_folder: Path) -> None:
    loaded = load_recipe(experiment.recipe, [f"model.name_or_path={tiny_model_folder}"])
    with pytest.raises(DataError, match=r"it has images, but .* is a model that reads text only") as raised:
        load(loaded)
    assert "dataset.columns" in (raised.value.hint or "")
    with pytest.raises(DataError, match=r"eval\.dataset: it has images") as raised:
        held_out(loaded)


def test_a_missing_file_is_told_with_its_row(experiment: Experiment) -> None:
    (experiment.folder / "rows" / "1.png").unlink()
    with pytest.raises(
        DataError, match=r"row 1: image 1 \(column `image`\): 1\.png does not exist; paths are taken from .*/rows, "
    ):
        load(load_recipe(experiment.recipe, []))


def test_an_evaluation_knows_another_image_from_the_one_before(experiment: Experiment) -> None:
    loaded = load_recipe(experiment.recipe, [])
    before = held_out(loaded)
    again = held_out(loaded)
    Image.fromarray(np.full((16, 16), 9, dtype=np.uint8)).save(experiment.folder / "rows" / "1.png")
    after = held_out(loaded)
    assert len(before.prompts) == 3
    assert before.prompt_digest() == again.prompt_digest() != after.prompt_digest()
    assert before.row_digest() == again.row_digest() != after.row_digest()
    assert before.prompts[1].ids == after.prompts[1].ids


def test_processes_that_ask_about_other_images_ask_for_other_things() -> None:
    prompt = Prompt(uid=PromptId("0:0"), ids=(1, 2), text="", messages=None, row={})
    first, same, other = (
        prompt_checksum(dataclasses.replace(prompt, images=(bytes(4), image))) for image in (b"a", b"a", b"b")
    )
    assert first == same != other


def test_rewards_are_tried_on_rows_with_images(experiment: Experiment) -> None:
    loaded = load_recipe(experiment.recipe, [])
    trial = score_completions(loaded, [SavedCompletion(row=row, prompt=None, text="?") for row in (0, 1)], step=1)
    assert [one.rewards.tolist() for one in trial.scored] == [[[0.0]], [[pytest.approx(0.2)]]]
