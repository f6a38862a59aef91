"""Weights below adapters are told from others by what they are, and not by where they are."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM

from grpo_cli.errors import ModelError
from grpo_cli.policy.adapters import save_adapters
from grpo_cli.policy.load import load_model
from grpo_cli.policy.weights_below import base_file, other_base, weights_digest
from grpo_cli.recipe.schema import LoraSection, ModelSection


def digest(folder: Path) -> str | None:
    return weights_digest(ModelSection(name_or_path=str(folder)), folder.parent)


def test_the_same_weights_in_other_files_and_precisions_are_the_same(tiny_model_folder: Path, tmp_path: Path) -> None:
    whole = digest(tiny_model_folder)
    assert whole is not None
    shutil.copytree(tiny_model_folder, tmp_path / "moved")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "rounded")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    tensors = load_file(tiny_model_folder / "model.safetensors")
    (tmp_path / "renamed").mkdir()
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file({**renamed, **head}, tmp_path / "renamed" / "model.safetensors")
    (tmp_path / "older").mkdir()  # with what is computed anew when a model is loaded
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    save_file({**tensors, **computed}, tmp_path / "older" / "model.safetensors")
    for name in ("moved", "shards", "rounded", "renamed", "older"):
        assert digest(tmp_path / name) == whole, name


def test_weights_that_were_trained_or_are_more_are_others(tiny_model_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_model_folder / "model.safetensors")
    own, others = digest(tiny_model_folder), []
    for number, name in enumerate(tensors):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({**tensors, name: tensors[name] * 1.02}, folder / "model.safetensors")
        others.append(digest(folder))
    others.append(digest(build_tiny_model(tmp_path / "deep", num_layers=3)))
    section = ModelSection(name_or_path=str(tiny_model_folder), random_weights_seed=0)
    others.append(weights_digest(section, tmp_path))
    assert not {own, None} & set(others)


def test_what_cannot_be_looked_at_has_no_digest(tiny_model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").rename(tmp_path / "old" / "pytorch_model.bin")
    assert digest(tmp_path / "old") is None
    assert weights_digest(ModelSection(name_or_path="org/never-fetched"), tmp_path) is None
    (tmp_path / "pointer").mkdir()
    (tmp_path / "pointer" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert digest(tmp_path / "pointer") is None
    shutil.copytree(tiny_model_folder, tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(tiny_model_folder).save_pretrained(tmp_path / "half", max_shard_size="20KB")
    (tmp_path / "half" / "model.safetensors").unlink(missing_ok=True)
    next((tmp_path / "half").glob("model-*.safetensors")).unlink()
    assert digest(tmp_path / "half") is None


def test_adapters_know_the_weights_below_them_wherever_they_are(tiny_model_folder: Path, tmp_path: Path) -> None:
    """Of adapters without a digest, as others write them, names are compared, and no more can be told."""
    section = ModelSection(name_or_path=str(tiny_model_folder), lora=LoraSection(r=2, target_modules=["q_proj"]))
    adapters = tmp_path / "adapters"
    save_adapters(load_model(section, folder=tmp_path), adapters)
    shutil.copytree(tiny_model_folder, tmp_path / "moved")
    build_tiny_model(tmp_path / "other", seed=1)

    def told(name: str) -> str | None:
        return other_base(adapters, ModelSection(name_or_path=name), tmp_path, key="--base")

    for name in ("moved", "other"):
        assert told(name) == f"they were trained on {tiny_model_folder}; --base is {name}"
    ((name, content),) = base_file(section, tmp_path).items()
    (adapters / name).write_bytes(content)
    assert told("moved") is None
    assert told(str(tiny_model_folder)) is None
    with pytest.raises(ModelError) as caught:
        told("other")
    assert caught.value.message == (
        f"--base: other has other weights than {tiny_model_folder}, which the adapters in {adapters} were trained on"
    )
