"""Loading: every kind of place that a model can come from, and what is said when it is not there."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, OPTConfig

from grpo_cli.errors import ModelError
from grpo_cli.policy.load import load_model, load_tokenizer
from grpo_cli.policy.locate import locate_model
from grpo_cli.recipe.schema import ModelSection


def test_a_folder_is_found_from_the_recipes_folder(tiny_model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "model")
    section = ModelSection(name_or_path="model")
    model = load_model(section, folder=tmp_path)
    tokenizer = load_tokenizer(section, folder=tmp_path)
    assert model.training
    assert model.dtype == torch.float32
    assert tokenizer.chat_template


def test_dtype_is_the_recipes(tiny_model_folder: Path, tmp_path: Path) -> None:
    section = ModelSection(name_or_path=str(tiny_model_folder), dtype="bfloat16")
    assert load_model(section, folder=tmp_path).dtype == torch.bfloat16


def test_float16_weights_are_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    load_model(ModelSection(name_or_path=str(tiny_model_folder)), folder=tmp_path).half().save_pretrained(
        tmp_path / "half"
    )
    with pytest.raises(ModelError, match="half has float16 weights"):
        load_model(ModelSection(name_or_path="half", dtype="auto"), folder=tmp_path)


def test_the_recipes_chat_template_replaces_the_tokenizers(tiny_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}!")
    section = ModelSection(name_or_path=str(tiny_model_folder), chat_template_path="template.jinja")
    tokenizer = load_tokenizer(section, folder=tmp_path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "hi!"


def test_a_resource_of_an_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tiny_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    location = locate_model("package://tiny_weights/tiny.gguf", tmp_path)
    assert (location.name_or_path, location.gguf_file) == (str(package), "tiny.gguf")
    assert "tiny_weights" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "model.name_or_path: ./nowhere does not exist"),
        ("missing.gguf", "model.name_or_path: missing.gguf does not exist"),
        ("package://no_such_package/x.gguf", "no package `no_such_package` is installed"),
        ("package://yaml/x.gguf", "package `yaml` has no x.gguf; it has "),
    ],
)
def test_a_place_that_is_not_there_is_named(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.name_or_path") as caught:
        locate_model(name, tmp_path)
    assert message in str(caught.value)


def test_a_hub_model_that_cannot_be_loaded_is_one_line_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(ModelSection(name_or_path="nobody/no-such-model"), folder=tmp_path)
    assert caught.value.message.startswith("model.name_or_path: cannot load nobody/no-such-model (offline): ")
    assert "\n" not in caught.value.message
    assert caught.value.hint is not None


def test_a_gguf_file_becomes_a_plain_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The converted model's weights are those of the file, in transformers' layout, and the second load reads the cache."""
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path / "cache"))
    embedding = write_tiny_gguf(tmp_path / "tiny.gguf")
    section = ModelSection(name_or_path="tiny.gguf")
    model = load_model(section, folder=tmp_path)
    np.testing.assert_array_equal(model.get_input_embeddings().weight.detach().numpy(), embedding)
    (folder,) = (tmp_path / "cache" / "gguf").iterdir()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    tokenizer = load_tokenizer(section, folder=tmp_path)
    assert tokenizer.decode(tokenizer("ab").input_ids) == "ab"
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    model.save_pretrained(tmp_path / "saved")  # a model that claims to be quantized would refuse


def test_dropout_that_a_family_keeps_as_a_number_is_switched_off(tmp_path: Path) -> None:
    """OPT calls `F.dropout` with numbers on its layers, and skips whole layers with probability `layerdrop`."""
    config = OPTConfig(
        vocab_size=300,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.5,
        attention_dropout=0.5,
        layerdrop=0.5,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(ModelSection(name_or_path=str(tmp_path)), folder=tmp_path)
    assert model.training
    ids = torch.arange(16)[None]
    first = model(ids).logits
    assert all(torch.equal(first, model(ids).logits) for _ in range(4))
    assert (model.config.dropout, model.config.attention_dropout, model.config.layerdrop) == (0.0, 0.0, 0.0)
    assert model.config.enable_bias is True  # a number between 0 and 1 only by its type
    torch.testing.assert_close(first, model.eval()(ids).logits)


@pytest.mark.parametrize(
    "flags",
    [
        {"temperature": 0.9, "top_p": 0.6},
        {"do_sample": False, "top_k": 20},
        {"pad_token_id": -1},
        {"early_stopping": True, "length_penalty": 2.0},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_a_generation_config_that_transformers_would_not_save_is_repaired(
    flags: dict[str, Any], tiny_model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | flags))
    model = load_model(ModelSection(name_or_path=str(folder)), folder=tmp_path)
    model.save_pretrained(tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert saved.eos_token_id == 257
    if "temperature" in flags:
        assert (saved.do_sample, saved.temperature, saved.top_p) == (True, 0.9, 0.6)


def test_a_sound_generation_config_is_left_alone(tiny_model_folder: Path, tmp_path: Path) -> None:
    model = load_model(ModelSection(name_or_path=str(tiny_model_folder)), folder=tmp_path)
    assert model.generation_config.to_dict() == GenerationConfig.from_pretrained(tiny_model_folder).to_dict()


def test_truncated_weights_are_one_line(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelError) as caught:
        load_model(ModelSection(name_or_path="model"), folder=tmp_path)
    assert caught.value.message.startswith("model.name_or_path: cannot load model")
    assert "\n" not in caught.value.message


def test_a_config_of_wrong_types_is_one_line(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": "large"}))
    with pytest.raises(ModelError, match=r"cannot load model .*hidden_size.*large") as caught:
        load_model(ModelSection(name_or_path="model"), folder=tmp_path)
    assert "\n" not in caught.value.message


def test_the_model_goes_to_its_device(tiny_model_folder: Path, tmp_path: Path) -> None:
    section = ModelSection(name_or_path=str(tiny_model_folder))
    model = load_model(section, folder=tmp_path, device=torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_device_that_does_not_take_the_model_is_one_line(tiny_model_folder: Path, tmp_path: Path) -> None:
    section = ModelSection(name_or_path=str(tiny_model_folder))
    with pytest.raises(ModelError, match=r"model\.name_or_path: cannot load"):
        load_model(section, folder=tmp_path, device="hpu")  # a kind of device that torch knows but is not built for


def test_the_models_revision_is_not_asked_of_another_tokenizer(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub cache in which only the model has the branch `tuned`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, branch in (("model", "tuned"), ("tokenizer", "main")):
        repository, commit = tmp_path / f"models--me--{name}", "0" * 40
        shutil.copytree(tiny_model_folder, repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / branch).write_text(commit)
    section = ModelSection(name_or_path="me/model", revision="tuned", tokenizer_name_or_path="me/tokenizer")
    assert len(load_tokenizer(section, folder=tmp_path)) == 260
    assert len(load_tokenizer(dataclasses.replace(section, tokenizer_name_or_path=None), folder=tmp_path)) == 260


def write_tiny_gguf(path: Path) -> np.ndarray:
    """Write a one-layer Llama with a byte-level vocabulary, and return its embedding."""
    hidden, heads, feed_forward = 32, 4, 64
    tokens = [*(chr(code) for code in range(33, 127)), "ab", "<|end|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    embedding = matrix(len(tokens), hidden)
    tensors = {
        "token_embd.weight": embedding,
        "output_norm.weight": matrix(hidden),
        "output.weight": matrix(len(tokens), hidden),
        "blk.0.attn_norm.weight": matrix(hidden),
        "blk.0.ffn_norm.weight": matrix(hidden),
        **{f"blk.0.attn_{name}.weight": matrix(hidden, hidden) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": matrix(feed_forward, hidden),
        "blk.0.ffn_up.weight": matrix(feed_forward, hidden),
        "blk.0.ffn_down.weight": matrix(hidden, feed_forward),
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding
