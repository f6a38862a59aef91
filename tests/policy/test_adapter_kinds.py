"""Magnitudes, modules that are trained whole, and going on from adapters: merged, saved, loaded and as reference, against PEFT's own."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from padded_calls import GROUP, SAMPLING, load
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from grpo_cli.engine.strategies.replicas import NamedWeights
from grpo_cli.errors import ModelError
from grpo_cli.policy.adapter_settings import read_adapter_settings
from grpo_cli.policy.adapter_weights import FrozenWeights, MergedWeights
from grpo_cli.policy.adapters import (
    attach_adapters,
    output_head,
    save_adapters,
    with_reference_adapters,
    without_adapters,
)
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.head import is_plain_linear
from grpo_cli.policy.load import load_model
from grpo_cli.policy.merge import merged_model
from grpo_cli.recipe.schema import LoraSection, ModelSection

KINDS: dict[str, dict[str, Any]] = {
    "magnitudes": {"use_dora": True},
    "magnitudes of some": {"use_dora": True, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "norms": {"modules_to_save": ["model.norm", "input_layernorm"]},
    "all": {"use_dora": True, "dropout": 0.1, "modules_to_save": ["embed_tokens", "norm"]},
}


def adapted(folder: Path, *, trained: Path | None = None, keeps_reference: bool = False, **settings: Any) -> Any:
    section = ModelSection(name_or_path=str(folder), lora=LoraSection(**{"r": 2, **settings}))
    return load_model(section, folder=folder, adapters=trained, keeps_reference=keeps_reference)


def train_a_little(model: Any, seed: int = 1) -> None:
    """Change what is trained, and nothing else."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))


def logps(model: Any, *, shared: bool = False) -> torch.Tensor:
    policy = PolicyModel(model, sampling=SAMPLING)
    if shared:
        policy.share_prefix()
    with torch.no_grad():
        found: torch.Tensor = policy((GROUP,)).logps
    policy.feed_prompts_apart()
    return found


def assert_same_tensors(one: Path, other: Path) -> None:
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "model", tied=request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_merged_and_what_is_saved_say_the_same(kind: str, folder: Path, tmp_path: Path) -> None:
    plain, model = load(folder), adapted(folder, **KINDS[kind])
    torch.testing.assert_close(logps(model), logps(plain), rtol=1e-5, atol=1e-5, msg="fresh ones change nothing")
    train_a_little(model)
    said = logps(model)
    assert (said - logps(plain)).abs().max() > 0.05
    torch.testing.assert_close(logps(model, shared=True), said, rtol=1e-4, atol=1e-4)
    merged = dict(MergedWeights(model, NamedWeights(model)))
    assert merged.keys() == dict(NamedWeights(plain)).keys()
    whole = load(folder)
    whole.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logps(whole), said, rtol=1e-4, atol=1e-4)

    save_adapters(model, tmp_path / "saved")
    again = adapted(folder, trained=tmp_path / "saved", **KINDS[kind])
    assert torch.equal(logps(again), said)
    # PEFT reads them, too. In float64, for the attention of random weights makes much of rounding.
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "saved")).eval()
    with torch.no_grad():
        ids = torch.arange(5, 25)[None]
        torch.testing.assert_close(theirs.double()(ids).logits, model.double()(ids).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_without_them_the_model_is_what_it_was(kind: str, folder: Path) -> None:
    plain, model = load(folder), adapted(folder, **KINDS[kind])
    train_a_little(model)
    said = logps(model)
    with without_adapters(model):
        assert torch.equal(logps(model), logps(plain))
    assert torch.equal(logps(model), said)
    below = dict(FrozenWeights(NamedWeights(model)))
    assert all(torch.equal(tensor, below[name]) for name, tensor in NamedWeights(plain))


def test_a_head_that_is_trained_whole_is_computed_as_any_other(folder: Path) -> None:
    """In chunks of logits that are never kept; where it is the embedding, both are one matrix with one gradient."""
    model = adapted(folder, modules_to_save=["lm_head"])
    head = output_head(model)
    assert is_plain_linear(head)
    trained = [name for name, one in model.named_parameters() if one.requires_grad and ".lora_" not in name]
    assert len(trained) == 1
    stats = PolicyModel(model, sampling=SAMPLING)((GROUP,))
    torch.autograd.backward(stats.logps.sum())
    gradient = head.weight.grad
    assert gradient is not None

    whole = load(folder)
    torch.autograd.backward(PolicyModel(whole, sampling=SAMPLING)((GROUP,)).logps.sum())
    torch.testing.assert_close(gradient, whole.lm_head.weight.grad, rtol=1e-4, atol=1e-5)
    with without_adapters(model):
        assert output_head(model) is not head


def test_merged_magnitudes_of_layers_that_keep_weights_transposed_are_pefts() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    attach_adapters(model, LoraSection(r=2, target_modules=["c_attn"], use_dora=True))
    train_a_little(model)
    merged = dict(MergedWeights(model, NamedWeights(model)))
    layer = copy.deepcopy(model).transformer.h[0].attn.c_attn
    layer.merge()
    torch.testing.assert_close(merged["transformer.h.0.attn.c_attn.weight"], layer.get_base_layer().weight.data)


@pytest.mark.parametrize("kind", ["magnitudes", "both", "all"])
def test_where_a_run_goes_on_from_is_the_reference_and_stays_there(kind: str, folder: Path, tmp_path: Path) -> None:
    first = adapted(folder, **KINDS[kind])
    train_a_little(first)
    began = logps(first)
    save_adapters(first, tmp_path / "first")
    settings = {**KINDS[kind], "adapter_name_or_path": str(tmp_path / "first")}
    model = adapted(folder, keeps_reference=True, **settings)
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    assert names == [name for name, one in first.named_parameters() if one.requires_grad]
    assert torch.equal(logps(model), began)
    train_a_little(model, seed=2)
    said = logps(model)
    assert (said - began).abs().max() > 0.05
    with with_reference_adapters(model):
        assert torch.equal(logps(model), began)
    assert torch.equal(logps(model), said)
    merged, plain = dict(MergedWeights(model, NamedWeights(model))), load(folder)
    assert merged.keys() == dict(NamedWeights(plain)).keys(), "the reference is not sent anywhere"
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logps(plain), said, rtol=1e-4, atol=1e-4)

    save_adapters(model, tmp_path / "checkpoint")
    resumed = adapted(folder, trained=tmp_path / "checkpoint", keeps_reference=True, **settings)
    assert torch.equal(logps(resumed), said)
    with with_reference_adapters(resumed):
        assert torch.equal(logps(resumed), began)
    save_adapters(model, tmp_path / "reference", adapter="reference")
    assert_same_tensors(tmp_path / "reference", tmp_path / "first")
    assert not adapted(folder, **settings).peft_config.keys() - {"default"}, "no reference is asked for"


@pytest.mark.parametrize("targets", [["all-linear"], ["down_proj"]])
def test_new_magnitudes_change_nothing_beside_bfloat16_weights(targets: list[str], folder: Path) -> None:
    """The lengths of rows are not rounded to the precision of the weights."""
    lora = LoraSection(r=2, use_dora=True, target_modules=targets)
    section = ModelSection(name_or_path=str(folder), dtype="bfloat16", lora=lora)
    model = load_model(section, folder=folder)
    said = logps(model)
    with without_adapters(model):
        assert torch.equal(logps(model), said)
    for name, one in model.named_parameters():
        if ".lora_magnitude_vector." in name:
            weight = model.get_parameter(f"{name.partition('.lora_')[0]}.base_layer.weight")
            torch.testing.assert_close(one, weight.float().norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["plain", "magnitudes"])
def test_the_reference_is_not_rounded_to_the_precision_of_the_weights(kind: str, folder: Path, tmp_path: Path) -> None:
    def begun(**more: Any) -> Any:
        lora = LoraSection(r=2, use_dora=kind == "magnitudes", **more)
        section = ModelSection(name_or_path=str(folder), dtype="bfloat16", lora=lora)
        return load_model(section, folder=folder, keeps_reference=bool(more))

    first = begun()
    train_a_little(first)
    save_adapters(first, tmp_path / "first")
    model = begun(adapter_name_or_path=str(tmp_path / "first"))
    with with_reference_adapters(model):
        assert torch.equal(logps(model), logps(first))


def test_settings_are_read_as_they_were_written(folder: Path, tmp_path: Path) -> None:
    written = LoraSection(
        r=4, alpha=3, use_rslora=True, use_dora=True, target_modules=["q_proj"], modules_to_save=["norm"]
    )
    model = load_model(ModelSection(name_or_path=str(folder), lora=written), folder=folder)
    save_adapters(model, tmp_path / "saved")
    found = read_adapter_settings(tmp_path / "saved")
    assert found.base == str(folder)
    assert (found.lora.r, found.lora.alpha, found.lora.use_rslora, found.lora.use_dora) == (4, 3, True, True)
    again = load_model(
        ModelSection(name_or_path=str(folder), lora=found.lora), folder=folder, adapters=tmp_path / "saved"
    )
    assert [name for name, _ in again.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is LOHA"),
        ({"bias": "all"}, "bias is all"),
        ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern is \{'q_proj': 8\}"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa"),
        ({"target_modules": ".*proj"}, r"target_modules is '\.\*proj' and not a list"),
    ],
)
def test_adapters_of_another_kind_are_refused_in_a_line(
    change: dict[str, Any], message: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    save_adapters(adapted(tiny_model_folder), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError, match=rf"model\.lora\.adapter_name_or_path: .* not known here: {message}"):
        read_adapter_settings(tmp_path)
    with pytest.raises(ModelError, match=r"adapter_name_or_path: .* holds no adapters"):
        read_adapter_settings(tiny_model_folder)


def test_modules_that_cannot_be_trained_whole_are_refused(tiny_model_folder: Path) -> None:
    for names, message in (
        (
            ["embd_tokens"],
            "has no modules called embd_tokens\n  hint: did you mean `embed_tokens`[?] those with weights are ",
        ),
        (["projector"], "has no modules called projector"),
        (["rotary_emb"], "rotary_emb has no weights; allowed: modules that have"),
        (["self_attn"], "q_proj gets adapters as well; allowed: one of the two"),
    ):
        with pytest.raises(ModelError, match=rf"model\.lora\.modules_to_save: .*{message}"):
            adapted(tiny_model_folder, modules_to_save=names, target_modules=["q_proj", "up_proj"])
    with pytest.raises(ModelError, match=r"modules_to_save: it leaves no linear layer that could get adapters"):
        adapted(tiny_model_folder, modules_to_save=["layers"])


def test_of_a_module_without_weights_those_inside_it_are_trained_whole(tiny_model_folder: Path, tmp_path: Path) -> None:
    """And `all-linear` puts adapters on the others."""
    model = adapted(tiny_model_folder, modules_to_save=["layers.0.self_attn"])
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    whole = {f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"}
    assert {name for name in trained if ".modules_to_save." in name} == {
        f"{name}.modules_to_save.default.weight" for name in whole
    }
    assert sum(".lora_A." in name for name in trained) == 2 * 7 - 4
    train_a_little(model)
    save_adapters(model, tmp_path)
    merged = merged_model(tmp_path)
    torch.testing.assert_close(logps(merged), logps(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "smolvlm"])
def test_a_projector_is_trained_whole_by_the_name_that_freeze_has_for_it(
    family: str, vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = vision_folder(family)
    frozen = load_model(ModelSection(name_or_path=str(folder), freeze=["projector"]), folder=folder)
    projector = {name: one for name, one in frozen.named_parameters() if not one.requires_grad}
    model = adapted(folder, modules_to_save=["projector"])
    copies = {
        name.replace(".modules_to_save.default", ""): one.shape
        for name, one in model.named_parameters()
        if one.requires_grad and ".modules_to_save." in name
    }
    assert copies == {name: one.shape for name, one in projector.items()}
    before = logps(model)
    train_a_little(model)
    assert (logps(model) - before).abs().max() > 0.01
    save_adapters(model, tmp_path)
    torch.testing.assert_close(logps(merged_model(tmp_path)), logps(model), rtol=1e-4, atol=1e-4)


def test_a_projector_with_a_weight_outside_of_its_modules_names_them(vision_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError) as caught:
        adapted(vision_folder("llava_next"), modules_to_save=["projector"])
    assert "a weight that is in no module of its own, model.image_newline; allowed: modules" in caught.value.message
    names = ("linear_1", "linear_2")
    assert caught.value.hint == f"name those of it: {', '.join(f'model.multi_modal_projector.{one}' for one in names)}"


def test_a_model_that_sees_has_all_kinds_and_is_merged_to_one_that_says_the_same(
    vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Magnitudes in the vision tower and the projector, too, and norms of the text model that are trained whole."""
    folder = vision_folder("qwen2_5_vl")
    settings: dict[str, Any] = {"use_dora": True, "modules_to_save": ["input_layernorm"]}
    model = adapted(folder, **settings)
    adapters = [name for name, one in model.named_parameters() if one.requires_grad]
    assert any(".visual." in name and ".lora_magnitude_vector." in name for name in adapters)
    before = logps(model)
    train_a_little(model)
    said = logps(model)
    assert (said - before).abs().max() > 0.05
    save_adapters(model, tmp_path)
    again = adapted(folder, trained=tmp_path, **settings)
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    ours, theirs = dict(MergedWeights(model, NamedWeights(model))), dict(merged_model(tmp_path).named_parameters())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
