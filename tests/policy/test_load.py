"""Loading: every kind of place that a model can come from, and what is said when it is not there."""

import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

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
