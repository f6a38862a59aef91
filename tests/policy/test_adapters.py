"""Adapters: what they change and what not, against PEFT's own merge and the model without them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from padded_calls import GROUP, SAMPLING, load
from peft.tuners.lora import LoraLayer
from tiny_models import build_tiny_model
from transformers import GPT2Config, GPT2LMHeadModel

from grpo_cli.engine.strategies.replicas import NamedWeights
from grpo_cli.errors import CheckpointError, ModelError
from grpo_cli.policy.adapter_weights import MergedWeights
from grpo_cli.policy.adapters import attach_adapters, load_adapters, save_adapters, without_adapters
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_model
from grpo_cli.policy.reference import AdapterReference
from grpo_cli.recipe.schema import LoraSection, ModelSection


def adapted(folder: Path, *, trained: Path | None = None, **settings: Any) -> Any:
    """The model of a folder with adapters, as a recipe asks for them."""
    section = ModelSection(name_or_path=str(folder), lora=LoraSection(**settings))
    return load_model(section, folder=folder, adapters=trained)


def train_a_little(model: Any) -> None:
    """Change what is trained, and nothing else."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))


def logps(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = PolicyModel(model, sampling=SAMPLING)((GROUP,)).logps
    return found


def test_fresh_adapters_change_nothing_and_are_all_that_is_trained(tiny_model_folder: Path) -> None:
    plain, model = load(tiny_model_folder), adapted(tiny_model_folder, r=2)
    assert torch.equal(logps(model), logps(plain))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert len(trained) == 2 * 7 * 2, "two matrices for each of seven linear layers of two blocks"
    train_a_little(model)
    assert (logps(model) - logps(plain)).abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize(("targets", "rslora"), [(["all-linear"], False), (["o_proj"], True)])
def test_merged_weights_are_those_of_a_model_without_adapters_that_says_the_same(
    family: str, targets: list[str], rslora: bool, tmp_path: Path
) -> None:
    folder = build_tiny_model(tmp_path / family, family)
    model = adapted(folder, r=4, alpha=3.0, target_modules=targets, use_rslora=rslora)
    train_a_little(model)
    plain = load(folder)
    merged = dict(MergedWeights(model, NamedWeights(model)))
    assert merged.keys() == dict(NamedWeights(plain)).keys()
    changed = {name for name, tensor in NamedWeights(plain) if not torch.equal(tensor, merged[name])}
    assert changed == {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logps(plain), logps(model), rtol=1e-5, atol=1e-5)


def test_in_a_mixture_of_experts_the_experts_get_none(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "model", "qwen3_moe")
    model = adapted(folder, r=2)
    train_a_little(model)
    layers = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}
    merged = dict(MergedWeights(model, NamedWeights(model)))
    plain = load(folder)
    assert merged.keys() == dict(NamedWeights(plain)).keys()
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logps(plain), logps(model), rtol=1e-5, atol=1e-5)
    save_adapters(model, tmp_path / "saved")
    assert torch.equal(logps(adapted(folder, trained=tmp_path / "saved", r=2)), logps(model))
    with pytest.raises(ModelError, match=r"gets no adapters|has no layers|cannot put adapters"):
        adapted(folder, target_modules=["gate"])


def test_merged_weights_of_layers_that_keep_them_transposed_are_pefts(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    attach_adapters(model, LoraSection(r=2, target_modules=["c_attn"]))
    train_a_little(model)
    merged = dict(MergedWeights(model, NamedWeights(model)))
    assert merged["transformer.h.0.attn.c_attn.bias"] is not None
    layer = copy.deepcopy(model).transformer.h[0].attn.c_attn
    layer.merge()
    torch.testing.assert_close(merged["transformer.h.0.attn.c_attn.weight"], layer.get_base_layer().weight.data)


def test_merged_weights_are_what_they_are_at_each_iteration(tiny_model_folder: Path) -> None:
    model = adapted(tiny_model_folder, r=2)
    stream = MergedWeights(model, NamedWeights(model))
    before = dict(stream)
    train_a_little(model)
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(dict(stream)[name], before[name])


def test_the_reference_is_the_model_without_them_and_they_are_back_afterwards(tiny_model_folder: Path) -> None:
    plain, model = load(tiny_model_folder), adapted(tiny_model_folder, r=2)
    train_a_little(model)
    policy = PolicyModel(model, sampling=SAMPLING)
    changed = logps(model)
    reference = AdapterReference(policy, policy, switched=without_adapters)
    with reference.in_place():
        assert torch.equal(logps(model), logps(plain))
    assert torch.equal(logps(model), changed)
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 28
    assert not reference.moves


def test_what_a_checkpoint_holds_is_loaded_bit_for_bit(tiny_model_folder: Path, tmp_path: Path) -> None:
    model = adapted(tiny_model_folder, r=2)
    train_a_little(model)
    save_adapters(model, tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < sum(path.stat().st_size for path in tiny_model_folder.iterdir()) / 2
    again = adapted(tiny_model_folder, trained=tmp_path, r=2)
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.requires_grad == other.requires_grad


def test_adapters_of_another_kind_are_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    model = adapted(tiny_model_folder, r=2)
    save_adapters(model, tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"other layers or sizes than model\.lora asks for"):
        adapted(tiny_model_folder, trained=tmp_path / "saved", r=4)
    with pytest.raises(CheckpointError, match=r"other layers or sizes"):
        adapted(tiny_model_folder, trained=tmp_path / "saved", r=2, target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match=r"holds no adapters"):
        load_adapters(model, tiny_model_folder)
    with pytest.raises(ModelError, match=r"holds adapters \(model\.lora\), and is no whole model"):
        load_model(ModelSection(name_or_path=str(tmp_path / "saved")), folder=tmp_path)


def test_layers_that_are_not_there_or_not_linear_are_refused(tiny_model_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"has no layers called q_prj") as caught:
        adapted(tiny_model_folder, target_modules=["q_prj"])
    assert str(caught.value.hint).startswith("did you mean `q_proj`? its linear layers are down_proj, ")
    for name in ("embed_tokens", "lm_head", "mlp"):
        with pytest.raises(ModelError, match=rf"{name} gets no adapters; allowed: linear layers other than the head"):
            adapted(tiny_model_folder, target_modules=["q_proj", name])


def test_adapters_are_float32_beside_bfloat16_weights(tiny_model_folder: Path) -> None:
    section = ModelSection(name_or_path=str(tiny_model_folder), dtype="bfloat16", lora=LoraSection(r=2))
    model = load_model(section, folder=tiny_model_folder)
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    assert model.dtype == torch.bfloat16
    train_a_little(model)
    merged = dict(MergedWeights(model, NamedWeights(model)))
    assert merged["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32, "small changes are not rounded away here"
    assert torch.isfinite(logps(model)).all()
