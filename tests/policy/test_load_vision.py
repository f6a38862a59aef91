"""What is loaded for images, what is refused of it, and what is saved of it with a model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_vision_models import VISION_FAMILIES
from transformers import AutoProcessor
from vision_prompts import PICTURES

from grpo_cli.errors import ModelError
from grpo_cli.policy.load import load_config, load_model, load_shapes
from grpo_cli.policy.load_vision import load_vision, processor_files
from grpo_cli.recipe.load import load_recipe
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.vision.processor import VisionProcessor

FOR_TEXT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OF_ITS_OWN = (
    "{% for m in messages %}{% for p in m.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if p.type == 'image' else p.text }}{% endfor %}!{% endfor %}"
)
TURN = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}


def load(folder: Path, **settings: Any) -> VisionProcessor:
    vision = load_vision(ModelSection(name_or_path=str(folder), **settings), folder=folder)
    assert vision is not None
    return vision


@pytest.mark.parametrize(
    ("family", "options", "hint"),
    [
        ("qwen2_5_vl", {"max_pixel": 256}, "did you mean `max_pixels`?"),
        ("smolvlm", {"do_image_spliting": False}, "did you mean `do_image_splitting`?"),
        ("internvl", {"max_pixels": 256}, None),
    ],
)
def test_an_option_that_no_processor_knows_is_refused(
    family: str, options: dict[str, Any], hint: str | None, vision_folder: Callable[[str], Path]
) -> None:
    (name,) = options
    with pytest.raises(ModelError, match=rf"^model\.processor_kwargs: \w+ and \w+ have no option {name}") as raised:
        load(vision_folder(family), processor_kwargs=options)
    assert hint is None or raised.value.hint == hint


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2_vl", {"max_pixels": 256}),
        ("qwen3_vl", {"size": {"shortest_edge": 64, "longest_edge": 256}}),
        ("llava_next", {"vision_feature_select_strategy": "default"}),
        ("gemma3", {"do_pan_and_scan": False}),
        ("idefics3", {"max_image_size": {"longest_edge": 16}}),
        ("internvl", {"max_patches": 2, "use_fast": True}),
    ],
)
def test_options_that_one_of_them_knows_are_taken(
    family: str, options: dict[str, Any], vision_folder: Callable[[str], Path]
) -> None:
    assert load(vision_folder(family), processor_kwargs=options).settings


def test_the_recipes_options_are_taken_where_a_processor_is_made_and_where_it_is_called(
    vision_folder: Callable[[str], Path],
) -> None:
    """vLLM gives them with every call, for which `max_pixels` is deprecated: a warning, and so an error here."""
    options = load_recipe(Path("recipes/vlm.yaml"), look_for_files=False).recipe.model.processor_kwargs
    most = options["size"]["longest_edge"]
    folder = vision_folder("qwen2_5_vl")
    large = Image.new("RGB", (1000, 1000))
    patches = []
    for made, given in ((options, {}), ({}, options)):
        found = AutoProcessor.from_pretrained(folder, **made).image_processor(
            images=[large], return_tensors="pt", **given
        )
        patches.append(int(found["image_grid_thw"].prod()))
    side = 4  # pixels of a patch of the tiny model's
    assert 0.9 * most < side**2 * patches[0] <= most < 1000**2
    assert patches[0] == patches[1]
    assert load(folder, processor_kwargs=options).settings["image_processor"]["size"]["longest_edge"] == most


def test_another_tokenizer_is_refused(vision_folder: Callable[[str], Path], tiny_model_folder: Path) -> None:
    folder = vision_folder("qwen2_vl")
    with pytest.raises(
        ModelError, match=r"model\.tokenizer_name_or_path: found .*the tokenizer is that of the model's proc"
    ):
        load(folder, tokenizer_name_or_path=str(tiny_model_folder))
    assert load(folder, tokenizer_name_or_path=str(folder))


def test_a_template_for_text_is_refused(vision_folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "text.jinja"
    path.write_text(FOR_TEXT)
    with pytest.raises(ModelError, match=r"text\.jinja is a chat template for text"):
        load(vision_folder("qwen2_vl"), chat_template_path=str(path))


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_tensors_do_not_depend_on_a_chat_template(family: str, vision_folder: Callable[[str], Path]) -> None:
    images = PICTURES[:3]
    processor = AutoProcessor.from_pretrained(vision_folder(family))
    vision = VisionProcessor(processor)
    vision.encode(vision.render([{"role": "user", "content": [{"type": "image"}] * 3}]), images)
    processor.chat_template = None
    without = VisionProcessor(processor).tensors(images)
    expected = vision.tensors(images)
    assert without.keys() == expected.keys()
    assert all(torch.equal(without[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("source", ["recipe", "jinja", "json", "tokenizer"])
def test_the_saved_files_have_the_template_that_was_trained_with(
    source: str, vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, saved = tmp_path / "model", tmp_path / "saved"
    shutil.copytree(vision_folder("qwen2_vl"), model)
    settings: dict[str, Any] = {}
    file = model / "chat_template.jinja"
    expected = file.read_text() if source == "jinja" else OF_ITS_OWN
    if source == "recipe":
        settings["chat_template_path"] = str(tmp_path / "own.jinja")
        (tmp_path / "own.jinja").write_text(OF_ITS_OWN)
    elif source != "jinja":
        file.unlink()
        config = json.loads((model / "tokenizer_config.json").read_text())
        if source == "json":
            (model / "chat_template.json").write_text(json.dumps({"chat_template": OF_ITS_OWN}))
            config["chat_template"] = FOR_TEXT
        else:
            config["chat_template"] = OF_ITS_OWN
        (model / "tokenizer_config.json").write_text(json.dumps(config))
    section = ModelSection(name_or_path=str(model), **settings)
    vision = load_vision(section, folder=tmp_path)
    assert vision is not None
    assert vision.chat_template == expected
    for trained_with in (vision, None) if source != "tokenizer" else (vision,):
        shutil.rmtree(saved, ignore_errors=True)
        AutoProcessor.from_pretrained(model).tokenizer.save_pretrained(saved)
        shutil.copy(model / "config.json", saved)
        for name, content in processor_files(section, folder=tmp_path, vision=trained_with).items():
            (saved / name).write_bytes(content)
        opened = AutoProcessor.from_pretrained(saved)
        assert opened.apply_chat_template([TURN], tokenize=False) == vision.render([TURN])
        tensors = VisionProcessor(opened).tensors(PICTURES[:2])
        assert all(torch.equal(tensors[name], tensor) for name, tensor in vision.tensors(PICTURES[:2]).items())


@pytest.mark.parametrize("load_it", [load_model, load_shapes, load_config])
def test_options_for_a_model_that_reads_text_only_are_refused(
    load_it: Callable[..., Any], tiny_model_folder: Path
) -> None:
    section = ModelSection(name_or_path=str(tiny_model_folder), processor_kwargs={"max_patches": 2})
    with pytest.raises(
        ModelError,
        match=r'^model\.processor_kwargs: found the mapping {"max_patches": 2}, but .* reads text only',
    ):
        load_it(section, folder=tiny_model_folder)
