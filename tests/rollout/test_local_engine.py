"""The local engine against transformers: its `generate` for tokens, one plain forward for log-probabilities."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM, DynamicCache, MiniMaxConfig

from grpo_cli.distribution import filter_logits
from grpo_cli.rollout.local import LocalEngine
from grpo_cli.types import Completion, FinishReason, Group, Prompt, Sampling

Settings = Callable[..., Sampling]


def ids_of(groups: list[Group]) -> list[list[tuple[int, ...]]]:
    return [[completion.ids for completion in group.completions] for group in groups]


def greedy_reference(model: Any, prompt: Prompt, sampling: Sampling) -> tuple[int, ...]:
    """What transformers' own `generate` answers to one prompt without padding."""
    output = model.generate(
        input_ids=torch.tensor([prompt.ids]),
        attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=list(sampling.stop_ids),
    )
    return tuple(output[0, len(prompt.ids) :].tolist())


def plain_logits(model: Any, prompt: Prompt, completion: Completion) -> torch.Tensor:
    """Logits [L, V] that predict the completion, from one forward over prompt and completion."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt.ids + completion.ids])).logits[0].float()
    kept: torch.Tensor = logits[len(prompt.ids) - 1 : -1]
    return kept


def logps_of(logits: torch.Tensor, completion: Completion) -> torch.Tensor:
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_num_seqs", [1, 4, 64])
def test_greedy_tokens_are_those_of_generate(
    family: str, max_num_seqs: int, family_models: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    model = family_models[family]
    sampling = settings(temperature=0.0, max_tokens=16)
    engine = LocalEngine(model, tokenizer, max_num_seqs=max_num_seqs)
    groups = engine.generate(prompts, sampling, num_generations=2, seed_key=(0,))
    for prompt, group in zip(prompts, groups, strict=True):
        assert group.prompt is prompt
        expected = greedy_reference(model, prompt, sampling)
        assert [completion.ids for completion in group.completions] == [expected, expected]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_logps_are_those_of_a_plain_forward(
    family: str,
    changes: dict[str, float],
    family_models: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    settings: Settings,
) -> None:
    sampling = settings(**changes, max_tokens=20)
    engine = LocalEngine(family_models[family], tokenizer, max_num_seqs=6)
    groups = engine.generate(prompts, sampling, num_generations=3, seed_key=(1, "train", 2))
    for group in groups:
        for completion in group.completions:
            logits = plain_logits(family_models[family], group.prompt, completion)
            kept = filter_logits(
                logits / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
            )
            expected = logps_of(kept, completion)
            assert completion.logps.dtype == torch.float32
            torch.testing.assert_close(completion.logps, expected, atol=1e-4, rtol=0)


def test_greedy_logps_are_untempered(model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=8)
    for group in engine.generate(prompts, settings(temperature=0.0), num_generations=1, seed_key=(0,)):
        (completion,) = group.completions
        expected = logps_of(plain_logits(model, group.prompt, completion), completion)
        torch.testing.assert_close(completion.logps, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_samples_do_not_depend_on_what_they_are_batched_with(
    family: str, family_models: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    def sample(chosen: list[Prompt], max_num_seqs: int) -> dict[str, list[tuple[int, ...]]]:
        engine = LocalEngine(family_models[family], tokenizer, max_num_seqs=max_num_seqs)
        groups = engine.generate(chosen, settings(max_tokens=24), num_generations=4, seed_key=(7, "train", 3))
        return {group.prompt.uid: [completion.ids for completion in group.completions] for group in groups}

    together = sample(prompts, 64)
    assert sample(prompts, 2) == together  # fewer rows than one group has
    assert sample(prompts, 8) == together
    assert sample(prompts[::-1], 64) == together
    assert sample([prompts[3]], 64) == {prompts[3].uid: together[prompts[3].uid]}


def test_more_samples_leave_the_first_ones_as_they_were(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=64)
    few = ids_of(engine.generate(prompts, settings(), num_generations=2, seed_key=(0,)))
    many = ids_of(engine.generate(prompts, settings(), num_generations=6, seed_key=(0,)))
    assert [group[:2] for group in many] == few


def test_samples_of_a_group_differ_and_so_do_those_of_another_seed_key(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=64)
    one = ids_of(engine.generate(prompts, settings(), num_generations=8, seed_key=(0, "train", 1)))
    other = ids_of(engine.generate(prompts, settings(), num_generations=8, seed_key=(0, "train", 2)))
    assert all(len(set(group)) >= 7 for group in one)
    assert all(set(first) != set(second) for first, second in zip(one, other, strict=True))


def test_a_prompt_drawn_twice_is_sampled_by_its_uid(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=64)
    first, second = ids_of(engine.generate([prompts[0], prompts[0]], settings(), num_generations=4, seed_key=(0,)))
    assert first == second


def test_repetition_penalty_gives_the_tokens_of_generate(
    family_models: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    model = family_models["llama"]
    sampling = settings(temperature=0.0, repetition_penalty=1.6, max_tokens=24)
    groups = LocalEngine(model, tokenizer, max_num_seqs=64).generate(
        prompts, sampling, num_generations=1, seed_key=(0,)
    )
    expected = [greedy_reference(model, prompt, sampling) for prompt in prompts]
    assert [group[0] for group in ids_of(groups)] == expected
    plain = [greedy_reference(model, prompt, settings(temperature=0.0, max_tokens=24)) for prompt in prompts]
    assert expected != plain


def test_stop_tokens_end_a_completion_and_are_its_last_token(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    stop_ids = tuple(range(64))
    groups = LocalEngine(model, tokenizer, max_num_seqs=64).generate(
        prompts, settings(stop_ids=stop_ids, max_tokens=6), num_generations=8, seed_key=(3,)
    )
    reasons = set()
    for completion in (completion for group in groups for completion in group.completions):
        reasons.add(completion.finish_reason)
        assert not set(completion.ids[:-1]) & set(stop_ids)
        stopped = completion.ids[-1] in stop_ids
        assert completion.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(completion.ids) == 6
        assert len(completion.logps) == len(completion.ids)
        assert completion.text == tokenizer.decode(completion.ids, skip_special_tokens=True)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_stop_token_in_the_last_place_is_a_stop(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    everything = tuple(range(260))
    groups = LocalEngine(model, tokenizer, max_num_seqs=4).generate(
        prompts, settings(stop_ids=everything, max_tokens=1), num_generations=2, seed_key=(0,)
    )
    reasons = [completion.finish_reason for group in groups for completion in group.completions]
    assert reasons == [FinishReason.STOP] * 10


def test_an_immediate_end_of_sequence_is_a_completion_of_one_token(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    (greedy,) = LocalEngine(model, tokenizer, max_num_seqs=1).generate(
        prompts[:1], settings(temperature=0.0, max_tokens=1), num_generations=1, seed_key=(0,)
    )
    # Whatever the model likes best becomes the end token, by exchanging two rows of the tied embedding.
    favourite = greedy.completions[0].ids[0]
    assert favourite not in prompts[0].ids
    weight = model.get_input_embeddings().weight.data
    weight[[favourite, 257]] = weight[[257, favourite]]
    (group,) = LocalEngine(model, tokenizer, max_num_seqs=1).generate(
        prompts[:1], settings(temperature=0.0), num_generations=1, seed_key=(0,)
    )
    (completion,) = group.completions
    assert (completion.ids, completion.text, completion.finish_reason) == ((257,), "", FinishReason.STOP)
    assert completion.logps.shape == (1,)


def test_stop_tokens_are_not_sampled_before_min_tokens(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    stop_ids = tuple(range(128))
    sampling = settings(stop_ids=stop_ids, min_tokens=3)
    groups = LocalEngine(model, tokenizer, max_num_seqs=64).generate(
        prompts, sampling, num_generations=8, seed_key=(0,)
    )
    completions = [(group.prompt, completion) for group in groups for completion in group.completions]
    assert {len(completion.ids) for _, completion in completions} >= {4, 5}
    assert min(len(completion.ids) for _, completion in completions) == 4
    for prompt, completion in completions:
        logits = plain_logits(model, prompt, completion)
        logits[:3, list(stop_ids)] = -torch.inf
        torch.testing.assert_close(completion.logps, logps_of(logits, completion), atol=1e-4, rtol=0)


def test_a_stop_string_that_spans_tokens_ends_a_completion_and_stays_in_its_text(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=64)
    free = engine.generate(prompts, settings(max_tokens=24), num_generations=4, seed_key=(0,))
    string = next(
        completion.text[2:5]
        for group in free
        for completion in group.completions
        if completion.text[:5].isascii() and len(completion.text) > 5
    )
    stopped = engine.generate(
        prompts, settings(max_tokens=24, stop_strings=(string,)), num_generations=4, seed_key=(0,)
    )
    hits = 0
    for long, short in zip(
        (completion for group in free for completion in group.completions),
        (completion for group in stopped for completion in group.completions),
        strict=True,
    ):
        if string not in long.text:
            assert short.ids == long.ids
            continue
        hits += 1
        assert short.text == long.text[: long.text.index(string) + len(string)]
        assert short.ids == long.ids[: len(short.ids)]
        assert short.finish_reason is FinishReason.STOP
    assert hits >= 1


def test_logps_can_take_part_in_a_loss(model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings) -> None:
    (group,) = LocalEngine(model, tokenizer, max_num_seqs=4).generate(
        prompts[:1], settings(), num_generations=1, seed_key=(0,)
    )
    logps = group.completions[0].logps
    current = logps.clone().requires_grad_()
    # A tensor made in inference mode could not be saved for the backward of this product.
    (gradient,) = torch.autograd.grad((current * logps).sum(), current)
    assert torch.equal(gradient, logps)


def test_bfloat16_models_give_float32_logps_close_to_their_plain_forward(
    tiny_model_folder: Path, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.bfloat16)
    groups = LocalEngine(model, tokenizer, max_num_seqs=8).generate(
        prompts, settings(), num_generations=2, seed_key=(0,)
    )
    for group in groups:
        for completion in group.completions:
            expected = logps_of(plain_logits(model, group.prompt, completion), completion)
            assert completion.logps.dtype == torch.float32
            torch.testing.assert_close(completion.logps, expected, atol=0.15, rtol=0)


def test_a_cache_of_unknown_make_falls_back_to_repeated_prompts(
    tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    """MiniMax keeps the state of its linear attention outside the layers that row selection knows."""
    config = MiniMaxConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        layer_types=["linear_attention", "full_attention"],
        block_size=16,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=257,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([prompts[0].ids]), use_cache=True).past_key_values
    assert type(cache) is not DynamicCache
    sampling = settings(temperature=0.0)
    groups = LocalEngine(model, tokenizer, max_num_seqs=4).generate(
        prompts[:2], sampling, num_generations=2, seed_key=(0,)
    )
    for prompt, group in zip(prompts[:2], groups, strict=True):
        expected = greedy_reference(model, prompt, sampling)
        assert [completion.ids for completion in group.completions] == [expected, expected]
