"""The policy's forward against the model's own logits, computed one sequence at a time without padding."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import build_tiny_model
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    GraniteConfig,
    MambaConfig,
    Qwen2MoeConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_cli.distribution import filter_logits
from grpo_cli.errors import ModelError
from grpo_cli.policy import shared_prefix
from grpo_cli.policy.agreement import choose_forward
from grpo_cli.policy.forward import PolicyModel, has_windows
from grpo_cli.policy.load import disable_dropout, load_model
from grpo_cli.policy.shared_prefix import NAMES, WINDOWED_FAMILIES
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.types import Sampling, Segment

PLAIN = Sampling(stop_ids=(257,), max_tokens=8)
SEGMENTS = (
    Segment(prompt_ids=(5, 6, 7, 8, 9), completion_ids=((11, 12, 13), (14,), (15, 16, 17, 18, 19, 20, 257))),
    Segment(prompt_ids=(30,), completion_ids=((31, 32),)),
)


def load(folder: Path) -> Any:
    return load_model(ModelSection(name_or_path=str(folder)), folder=folder).eval()


def one_by_one(model: Any, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies by definition: each sequence alone, the model's full logits."""
    logps, entropies = [], []
    for segment in SEGMENTS:
        for completion in segment.completion_ids:
            ids = torch.tensor([segment.prompt_ids + completion])
            logits = model(input_ids=ids).logits[0, len(segment.prompt_ids) - 1 : -1] / sampling.temperature
            for position in range(len(completion)):
                if position < sampling.min_tokens:
                    logits[position, list(sampling.stop_ids)] = -torch.inf
            kept = filter_logits(logits, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
            for position, token in enumerate(completion):
                kept[position, token] = logits[position, token]
            probabilities = kept.softmax(-1)
            logps.append(probabilities.log()[torch.arange(len(completion)), torch.tensor(completion)])
            entropies.append(torch.special.entr(probabilities).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


@pytest.mark.parametrize("config", [CohereConfig, GraniteConfig], ids=["cohere", "granite"])
def test_logit_scales_of_the_family_are_respected(config: Any) -> None:
    scale = {"logit_scale": 0.3} if config is CohereConfig else {"logits_scaling": 3.0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.5,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=257,
            **scale,
        )
    )
    policy = PolicyModel(model, sampling=PLAIN)
    expected, _ = one_by_one(model, PLAIN)
    torch.testing.assert_close(policy(SEGMENTS).logps, expected, rtol=1e-4, atol=1e-4)
    assert choose_forward(policy, SEGMENTS) == []
    torch.testing.assert_close(policy(SEGMENTS).logps, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"min_tokens": 2}],
    ids=lambda changes: next(iter(changes)),
)
def test_log_probabilities_are_those_of_the_sampling_distribution(
    changes: dict[str, Any], tiny_model_folder: Path
) -> None:
    sampling = Sampling(**{"stop_ids": (257,), "max_tokens": 8, **changes})
    model = load(tiny_model_folder)
    expected_logps, expected_entropies = one_by_one(model, sampling)
    stats = PolicyModel(model, sampling=sampling)(SEGMENTS)
    torch.testing.assert_close(stats.logps, expected_logps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stats.entropies, expected_entropies, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(stats.logps).all() or sampling.min_tokens


def test_entropy_gradient_is_there_only_when_asked_for(tiny_model_folder: Path) -> None:
    policy = PolicyModel(load(tiny_model_folder), sampling=Sampling(stop_ids=(257,), max_tokens=8, top_k=5))
    assert not policy(SEGMENTS).entropies.requires_grad
    policy(SEGMENTS, entropy_grad=True).entropies.sum().backward()
    gradients = [parameter.grad for parameter in policy.parameters()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_padding_is_counted_as_computed_but_not_as_useful(tiny_model_folder: Path) -> None:
    stats = PolicyModel(load(tiny_model_folder), sampling=PLAIN)(SEGMENTS)
    lengths = [5 + 3 - 1, 5 + 1 - 1, 5 + 7 - 1, 1 + 2 - 1]
    assert stats.tokens_useful == sum(lengths)
    assert stats.tokens_computed == 4 * max(lengths)


def test_a_shared_prompt_is_fed_once_and_nothing_is_padded(tiny_model_folder: Path) -> None:
    policy = PolicyModel(load(tiny_model_folder), sampling=PLAIN)
    policy.share_prefix()
    stats = policy(SEGMENTS)
    assert stats.tokens_useful == stats.tokens_computed == (5 + 2 + 0 + 6) + (1 + 1)


def test_a_model_with_an_attention_of_its_own_is_fed_prompts_apart_with_a_notice(tiny_model_folder: Path) -> None:
    AttentionInterface.register("of_its_own", sdpa_attention_forward)
    AttentionMaskInterface.register("of_its_own", sdpa_mask)
    model = load(tiny_model_folder)
    model.set_attn_implementation("of_its_own")
    policy = PolicyModel(model, sampling=PLAIN)
    assert choose_forward(policy, SEGMENTS) == [
        "LlamaForCausalLM: prompts are fed once per completion, in padded rows: its attention is of_its_own"
    ]
    assert not policy.shares_prefix


@pytest.mark.parametrize(
    ("flaw", "notice"),
    [
        ("forward", "log-probabilities of a packed row differ by"),
        ("backward", "the gradient of a packed row differs by"),
    ],
)
def test_a_packed_row_that_does_not_agree_is_not_used(
    flaw: str, notice: str, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flawed(attend: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        output = attend(*arguments)
        return output * 1.1 if flaw == "forward" else (output - output.detach()) * 1.1 + output.detach()

    for way in ("two_part_attention", "_gathered_attention"):
        monkeypatch.setattr(shared_prefix, way, partial(flawed, getattr(shared_prefix, way)))
    policy = PolicyModel(load(tiny_model_folder), sampling=PLAIN)
    (line,) = choose_forward(policy, SEGMENTS)
    assert notice in line
    assert not policy.shares_prefix
    expected, _ = one_by_one(policy.model, PLAIN)
    torch.testing.assert_close(policy(SEGMENTS).logps, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=8), "carry a recurrent state"),
        (
            BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4),
            "a packed row is not possible (too many values",
        ),
    ],
    ids=["mamba", "bloom"],
)
def test_models_whose_tokens_mix_in_other_ways_are_fed_prompts_apart(config: Any, reason: str) -> None:
    torch.manual_seed(0)
    policy = PolicyModel(AutoModelForCausalLM.from_config(config), sampling=PLAIN)
    (notice,) = choose_forward(policy, SEGMENTS)
    assert notice.startswith(type(policy.model).__name__ + ": prompts are fed once per completion, in padded rows: ")
    assert reason in notice
    expected, _ = one_by_one(policy.model, PLAIN)
    torch.testing.assert_close(policy(SEGMENTS).logps, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mistral", "phi3", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_windows_shorter_than_a_completion_hold_in_a_packed_row(family: str, tmp_path: Path) -> None:
    """Every family whose windows are trusted, with a window that both prompts and completions are longer than."""
    window: dict[str, Any] = {"sliding_window": 3}
    if family.startswith("qwen"):
        window |= {"use_sliding_window": True, "max_window_layers": 1}
    model = load(build_tiny_model(tmp_path, family, **window))
    assert has_windows(model.config)
    assert model.config.model_type in WINDOWED_FAMILIES
    policy = PolicyModel(model, sampling=PLAIN)
    assert choose_forward(policy, SEGMENTS) == []
    expected, _ = one_by_one(model, PLAIN)
    torch.testing.assert_close(policy(SEGMENTS).logps, expected, rtol=1e-4, atol=1e-4)
    without = load(build_tiny_model(tmp_path / "without", family, **{**window, "sliding_window": 100}))
    assert (one_by_one(without, PLAIN)[0] - expected).abs().max() > 1e-3  # the window matters here


def test_windows_of_other_families_are_not_trusted_however_well_a_short_probe_agrees() -> None:
    config = Qwen2MoeConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        use_sliding_window=True,
        sliding_window=300,
        max_window_layers=1,
    )
    torch.manual_seed(0)
    policy = PolicyModel(AutoModelForCausalLM.from_config(config), sampling=PLAIN)
    (notice,) = choose_forward(policy, SEGMENTS)
    assert notice.endswith("in padded rows: its layers do not all attend to everything before")
    assert not policy.shares_prefix


def test_a_plain_call_finds_its_kernel_by_the_name_in_the_layers_config(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As flash attention does. A kernel that fails leaves the model as it was."""
    names: list[str] = []

    def kernel(module: Any, *states: Any, **arguments: Any) -> Any:
        names.append(module.config._attn_implementation)
        if len(names) > 2:
            raise RuntimeError("no such kernel")
        return sdpa_attention_forward(module, *states, **arguments)

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", kernel)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, NAMES["flash_attention_2"], sdpa_mask)
    model = load(tiny_model_folder)
    ids = torch.tensor([[5, 6, 7]])
    expected = model(ids).logits
    model.config._attn_implementation = NAMES["flash_attention_2"]
    torch.testing.assert_close(model(ids).logits, expected)
    assert names == ["flash_attention_2"] * 2
    assert model.config._attn_implementation == NAMES["flash_attention_2"]
    with pytest.raises(RuntimeError, match="no such kernel"):
        model(ids)
    assert model.config._attn_implementation == NAMES["flash_attention_2"]


def test_the_saved_model_does_not_know_of_the_shared_prefix(tiny_model_folder: Path, tmp_path: Path) -> None:
    policy = PolicyModel(load(tiny_model_folder), sampling=PLAIN)
    policy.share_prefix()
    policy.model.save_pretrained(tmp_path)
    assert "grpo" not in (tmp_path / "config.json").read_text()
    assert load(tmp_path).config._attn_implementation == "sdpa"


def test_dropout_is_off_in_training_mode_with_adapters_too(tmp_path: Path) -> None:
    model = with_dropout(tmp_path)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.5, init_lora_weights=False))
    disable_dropout(adapted)
    policy = PolicyModel(adapted.train(), sampling=PLAIN)
    first, second = policy(SEGMENTS).logps, policy(SEGMENTS).logps
    assert torch.equal(first, second)
    expected, _ = one_by_one(adapted.eval(), PLAIN)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)


def with_dropout(folder: Path) -> Any:
    build_tiny_model(folder, attention_dropout=0.5)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def test_dropout_left_on_would_change_log_probabilities(tmp_path: Path) -> None:
    policy = PolicyModel(with_dropout(tmp_path), sampling=PLAIN)
    assert not torch.equal(policy(SEGMENTS).logps, policy(SEGMENTS).logps)


def test_a_head_that_is_not_understood_falls_back_to_full_logits_with_a_notice(tiny_model_folder: Path) -> None:
    model = load(tiny_model_folder)
    forward = model.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits[..., 7] += 3.0
        return output

    model.forward = shifted
    policy = PolicyModel(model, sampling=PLAIN)
    (notice,) = choose_forward(policy, SEGMENTS)
    assert "full logits" in notice
    assert policy.full_logits
    assert not policy.shares_prefix
    expected, _ = one_by_one(model, PLAIN)
    torch.testing.assert_close(policy(SEGMENTS).logps, expected, rtol=1e-4, atol=1e-4)


def test_banned_stop_tokens_and_filters_do_not_spoil_the_comparison(tiny_model_folder: Path) -> None:
    """The probe holds a stop token where `min_tokens` bans it: its log-probability would be -inf in both forms."""
    sampling = Sampling(stop_ids=(257, 11), max_tokens=8, min_tokens=4, top_k=3)
    policy = PolicyModel(load(tiny_model_folder), sampling=sampling)
    assert choose_forward(policy, SEGMENTS) == []
    assert policy.shares_prefix
    assert policy.sampling == sampling


def test_a_model_that_gives_nan_is_refused(tiny_model_folder: Path) -> None:
    model = load(tiny_model_folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[8] = torch.nan
    with pytest.raises(ModelError, match=r"LlamaForCausalLM gives log-probabilities that are not numbers"):
        choose_forward(PolicyModel(model, sampling=PLAIN), SEGMENTS)


def test_a_model_that_is_random_in_training_mode_is_refused(tmp_path: Path) -> None:
    model = with_dropout(tmp_path)
    policy = PolicyModel(model, sampling=PLAIN)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM is not deterministic in training mode: .* differ by"):
        choose_forward(policy, SEGMENTS)
    assert choose_forward(PolicyModel(model.eval(), sampling=PLAIN), SEGMENTS) == []
