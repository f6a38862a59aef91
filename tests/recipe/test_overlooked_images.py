"""Images in a column that no prompt shows are told of, by `grpo check` as far as files and models are here."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures

from grpo_cli.cli.app import main
from grpo_cli.recipe.load import load_recipe
from grpo_cli.recipe.overlooked_images import columns_with_images, overlooked_in_files


def encoded(kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Pictures.new("RGB", (4, 4), "red").save(buffer, kind)
    return buffer.getvalue()


LINE = (
    "images of column `picture`: no prompt shows them; `dataset.columns: {image: picture}` would, and `{picture: picture}` says that "
    "they are for rewards alone"
)
PNG = encoded()


@pytest.fixture
def folder(recipe_folder: Path) -> Path:
    """With the folder of a model that sees."""
    (recipe_folder / "model").mkdir()
    (recipe_folder / "model" / "config.json").write_text(json.dumps({"model_type": "a", "vision_config": {}}))
    return recipe_folder


def lines(*overrides: str) -> list[str]:
    loaded = load_recipe(Path("good.yaml"), ["model.name_or_path=model", *overrides])
    return overlooked_in_files(loaded.recipe, loaded.folder)


def write_parquet(path: Path, values: list[Any], feature: Any) -> None:
    features = Features({"prompt": Value("string"), "picture": feature})
    rows = Dataset.from_dict({"prompt": ["a"] * len(values), "picture": values}, features=features)
    rows.to_parquet(str(path))


def test_a_column_of_another_name_is_told_with_the_key_that_maps_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(folder / "rows.parquet", [Pictures.new("RGB", (4, 4))] * 4, Image())
    arguments = ["good.yaml", "model.name_or_path=model", "dataset.name=rows.parquet"]
    monkeypatch.setattr(sys, "argv", ["grpo", "check", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"notice: {LINE}"


@pytest.mark.parametrize(
    ("feature", "value"), [(Value("binary"), PNG), (Image(), None), (List(Image()), [Pictures.new("L", (4, 4))])]
)
def test_bytes_and_lists_are_found_and_the_first_row_may_have_none(folder: Path, feature: Any, value: Any) -> None:
    write_parquet(folder / "rows.parquet", [None, value or Pictures.new("L", (4, 4)), None, None], feature)
    expected = LINE.replace("{image:", "{images:") if isinstance(value, list) else LINE
    assert lines("dataset.name=rows.parquet") == [expected]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.with_suffix(".jsonl").write_text('{"prompt": "a", "picture": "p/1.PNG"}\n' * 4),
        lambda path: path.with_suffix(".json").write_text(json.dumps([{"prompt": "a", "picture": ["1.jpg"]}] * 4)),
        lambda path: path.with_suffix(".csv").write_text("prompt,picture\n" + "a,1.webp\n" * 4),
    ],
)
def test_paths_are_told_by_their_suffix(folder: Path, write: Callable[[Path], Any]) -> None:
    write(folder / "rows")
    (found,) = lines(f"dataset.name={next(folder.glob('rows.*')).name}")
    assert found.startswith("images of column `picture`: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ("dataset.columns={image: picture}",),
        ("dataset.columns={picture: picture}",),
        ("model.name_or_path=org/model",),
        ("dataset.name=prompts.jsonl",),
    ],
)
def test_nothing_is_told_where_the_recipe_decides_or_nobody_sees(folder: Path, overrides: tuple[str, ...]) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "picture": "1.png"}\n' * 4)
    assert lines("dataset.name=rows.jsonl", *overrides) == []


def test_nothing_is_told_where_prompts_show_images(folder: Path) -> None:
    part = {"type": "image", "path": "1.png"}
    for row in (
        {"prompt": "a", "image": "0.png", "picture": "1.png"},
        {"prompt": [{"role": "user", "content": [part]}], "picture": "1.png"},
    ):
        (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
        assert lines("dataset.name=rows.jsonl") == []


def test_what_is_held_out_is_told_by_its_own_key(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "picture": "1.png"}\n' * 4)
    (found,) = lines("eval.dataset.name=rows.jsonl")
    assert "`eval.dataset.columns: {image: picture}`" in found


@pytest.mark.parametrize(
    ("value", "is_image"),
    [
        (PNG, True),
        (encoded("JPEG"), True),
        ({"bytes": PNG, "path": None}, True),
        ({"bytes": None, "path": "a.webp"}, True),
        (Pictures.new("1", (1, 1)), True),
        (b"no image", False),
        (b"", False),
        ({"bytes": None, "path": None}, False),
        ("see a.png", True),  # a path may have spaces
        ("see\na.png", False),
        ("a.mp4", False),
        ([], False),
        (["a.png", "b"], False),
        (7, False),
    ],
)
def test_what_an_image_is(value: Any, is_image: bool) -> None:
    assert columns_with_images([{"a": value}]) == ({"a": False} if is_image else {})
