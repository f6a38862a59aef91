"""vLLM in this process: it samples what it should, and leaves training alone."""

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from colocated import END, KEY, LONGEST, SEQUENCES, G
from optional_packages import needs_vllm
from transformers import AutoModelForCausalLM

from grpo_cli.errors import Interrupted, ModelError, TrainingError
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.rollout.local.stops import StopCheck
from grpo_cli.rollout.vllm.colocate import ColocateEngine
from grpo_cli.rollout.vllm.containment import Containment
from grpo_cli.types import FinishReason, Group, PolicyVersion, Prompt, PromptId, Sampling, Segment

pytestmark = [
    pytest.mark.slow,
    needs_vllm,
]


def process_state() -> dict[str, Any]:
    """What training relies on in this process."""
    return {
        "environment": dict(os.environ),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]  # noqa: NPY002  the global one is meant
        "torch": torch.get_rng_state().tolist(),
        "set_num_threads": torch.set_num_threads,
        "num_threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "memory": [line for line in Path("/proc/self/status").read_text().splitlines() if "_allowed" in line],
        "signals": [signal.getsignal(number) for number in (2, 15)],
    }


@pytest.fixture(scope="module")
def start() -> list[dict[str, Any]]:
    """States of the process before and after the engine's start."""
    return []


@pytest.fixture(scope="module")
def progress() -> list[int]:
    return []


@pytest.fixture(scope="module")
def engine(
    arguments: dict[str, Any], tokenizer: Any, progress: list[int], start: list[dict[str, Any]]
) -> Iterator[ColocateEngine]:
    with pytest.MonkeyPatch.context() as launcher:
        launcher.setenv("LOCAL_WORLD_SIZE", "7")  # vLLM writes its own there
        start.append(process_state())
        engine = ColocateEngine(
            arguments, tokenizer, bucket_bytes=1 << 18, dtype=None, max_num_seqs=SEQUENCES, on_progress=progress.append
        )
        start.append(process_state())
        yield engine
        engine.close()
    gc.collect()


@pytest.fixture
def model(folder: Path) -> Any:
    """The trainer's, which the test may change."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def synced(engine: ColocateEngine, model: Any) -> ColocateEngine:
    """The engine with the weights of `model`."""
    engine.sync(list(model.named_parameters()), PolicyVersion(1))
    return engine


def samples(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[completion.ids for completion in group.completions] for group in groups]


def largest_difference(groups: Sequence[Group], model: Any, sampling: Sampling) -> float:
    """Compare the engine's log-probabilities with the trainer's."""
    segments = tuple(
        Segment(prompt_ids=group.prompt.ids, completion_ids=tuple(one.ids for one in group.completions))
        for group in groups
    )
    with torch.no_grad():
        trainer = PolicyModel(model, sampling=sampling)(segments).logps
    ours = torch.cat([one.logps for group in groups for one in group.completions])
    assert ours.isfinite().all()
    return float((ours - trainer).abs().max())


def test_a_start_leaves_the_process_as_it_was(engine: ColocateEngine, start: list[dict[str, Any]]) -> None:
    before, after = start
    assert before == after


def test_a_sync_and_a_sample_leave_the_process_as_it_was(
    synced: ColocateEngine, model: Any, prompts: list[Prompt], settings: Callable[..., Sampling]
) -> None:
    before = process_state()
    told: list[Group] = []
    synced.sync(list(model.named_parameters()), PolicyVersion(2))
    groups = synced.generate(prompts, settings(), num_generations=G, seed_key=KEY, on_group=told.append)
    assert process_state() == before
    assert {id(group) for group in told} == {id(group) for group in groups}


def test_vllm_computes_in_its_own_precision_under_autocast() -> None:
    matrix = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with Containment()():
            assert (matrix @ matrix).dtype == torch.float32
        assert (matrix @ matrix).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8, "temperature": 0.9},
        {"top_k": 5, "min_p": 0.05, "temperature": 1.3},
        {"min_tokens": 12, "max_tokens": 20, "stop_ids": (*range(128), END)},
        {"stop_ids": (*range(16), END)},
    ],
    ids=str,
)
def test_log_probabilities_are_those_that_the_trainer_computes(
    changes: dict[str, Any],
    synced: ColocateEngine,
    model: Any,
    prompts: list[Prompt],
    settings: Callable[..., Sampling],
) -> None:
    sampling = settings(**{"max_tokens": 32, **changes})
    groups = synced.generate(prompts, sampling, num_generations=8, seed_key=KEY)
    assert largest_difference(groups, model, sampling) < 1e-4
    for completion in (completion for group in groups for completion in group.completions):
        stopped = completion.ids[-1] in sampling.stop_ids
        assert not set(completion.ids[:-1]) & set(sampling.stop_ids)
        assert completion.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert sampling.min_tokens < len(completion.ids) <= sampling.max_tokens
        assert stopped or len(completion.ids) == sampling.max_tokens


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(
    synced: ColocateEngine, model: Any, tokenizer: Any, prompts: list[Prompt], settings: Callable[..., Sampling]
) -> None:
    sampling = settings(stop_strings=("a", "b", "c", "d", "0", "1", "2", "3", " "), max_tokens=60)
    check = StopCheck(tokenizer, sampling)
    groups = synced.generate(prompts, sampling, num_generations=8, seed_key=KEY)
    completions = [completion for group in groups for completion in group.completions]
    assert sum(completion.text.endswith(sampling.stop_strings) for completion in completions) > 20
    for completion in completions:
        ended = [check.ended([completion.ids[:length]])[0] for length in range(1, len(completion.ids) + 1)]
        assert not any(ended[:-1])
        assert ended[-1] == (completion.finish_reason == FinishReason.STOP)
        assert completion.text == tokenizer.decode(completion.ids, skip_special_tokens=True)
    assert largest_difference(groups, model, sampling) < 1e-4


def test_samples_depend_on_key_and_prompt_but_not_on_the_company(
    synced: ColocateEngine, prompts: list[Prompt], settings: Callable[..., Sampling]
) -> None:
    together = samples(synced.generate(prompts, settings(), num_generations=G, seed_key=KEY))
    backwards = samples(synced.generate(prompts[::-1], settings(), num_generations=G, seed_key=KEY))[::-1]
    alone = [samples(synced.generate([one], settings(), num_generations=G, seed_key=KEY))[0] for one in prompts]
    assert together == backwards == alone
    assert len({ids for group in together for ids in group}) == len(prompts) * G
    other = samples(synced.generate(prompts, settings(), num_generations=G, seed_key=(2, "train", 0)))
    renamed = [replace(prompt, uid=PromptId(f"9:{prompt.uid}")) for prompt in prompts]
    assert not {ids for group in together for ids in group} & {ids for group in other for ids in group}
    assert samples(synced.generate(renamed, settings(), num_generations=G, seed_key=KEY)) != together


def test_greedy_completions_of_a_prompt_are_one(
    synced: ColocateEngine, model: Any, prompts: list[Prompt], settings: Callable[..., Sampling]
) -> None:
    greedy = settings(temperature=0.0)
    for prompt, group in zip(prompts, synced.generate(prompts, greedy, num_generations=3, seed_key=KEY), strict=True):
        (ids,) = {completion.ids for completion in group.completions}
        assert [completion.index for completion in group.completions] == [0, 1, 2]
        logits = model(torch.tensor([prompt.ids + ids])).logits[0]
        assert tuple(logits[len(prompt.ids) - 1 : -1].argmax(-1).tolist()) == ids


def test_a_sync_replaces_all_weights_and_forgets_what_was_cached(
    synced: ColocateEngine, model: Any, tokenizer: Any, settings: Callable[..., Sampling]
) -> None:
    # Longer than a block of vLLM's cache, so that keys and values of it are kept.
    prompt = Prompt(uid=PromptId("0:0"), ids=tuple(range(140)), text="", messages=None, row={})
    synced.generate([prompt], settings(), num_generations=G, seed_key=KEY)
    old = AutoModelForCausalLM.from_pretrained(model.name_or_path).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    report = synced.sync(list(model.named_parameters()), PolicyVersion(7))
    groups = synced.generate([prompt], settings(), num_generations=G, seed_key=KEY)
    assert report.version == groups[0].completions[0].policy_version == 7
    assert report.bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert largest_difference(groups, model, settings()) < 1e-4
    assert largest_difference(groups, old, settings()) > 0.1


def test_progress_is_told_in_tokens_of_finished_prompts(
    synced: ColocateEngine, prompts: list[Prompt], progress: list[int], settings: Callable[..., Sampling]
) -> None:
    for temperature in (1.0, 0.0):
        progress.clear()
        groups = synced.generate(prompts, settings(temperature=temperature), num_generations=G, seed_key=KEY)
        tokens = [sum(len(completion.ids) for completion in group.completions) for group in groups]
        assert sorted(progress) == sorted(tokens)


def test_an_interrupted_sample_leaves_no_requests_behind(
    synced: ColocateEngine, prompts: list[Prompt], settings: Callable[..., Sampling], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = samples(synced.generate(prompts, settings(), num_generations=G, seed_key=KEY))
    before = process_state()

    def interrupt(tokens: int) -> None:
        raise Interrupted(15)

    with monkeypatch.context() as patch:
        patch.setattr(synced, "_on_progress", interrupt)
        with pytest.raises(Interrupted):
            synced.generate(prompts, settings(), num_generations=64, seed_key=KEY)
    assert not synced._llm.llm_engine.has_unfinished_requests()
    assert not synced._llm.llm_engine.engine_core.engine_core.scheduler.has_unfinished_requests()
    assert process_state() == before
    assert samples(synced.generate(prompts, settings(), num_generations=G, seed_key=KEY)) == expected


def test_no_prompts_give_no_groups(synced: ColocateEngine, settings: Callable[..., Sampling]) -> None:
    assert synced.generate([], settings(), num_generations=G, seed_key=KEY) == []


def test_a_sequence_that_may_become_too_long_is_refused(
    synced: ColocateEngine, prompts: list[Prompt], settings: Callable[..., Sampling]
) -> None:
    with pytest.raises(
        TrainingError, match=f"max_model_length: .* up to {LONGEST} tokens together; here .* {LONGEST + 2}"
    ):
        synced.generate(prompts[:1], settings(max_tokens=LONGEST), num_generations=1, seed_key=KEY)


def test_nothing_is_sampled_after_a_sync_that_failed_until_one_succeeds(
    synced: ColocateEngine, model: Any, prompts: list[Prompt], settings: Callable[..., Sampling]
) -> None:
    expected = samples(synced.generate(prompts, settings(), num_generations=G, seed_key=KEY))
    weights = list(model.named_parameters())
    with pytest.raises(TrainingError, match=r"got no weights for .*model\.layers\.1"):
        synced.sync([(name, tensor) for name, tensor in weights if "layers.1" not in name], PolicyVersion(2))
    with pytest.raises(AssertionError, match="no weights"):
        synced.generate(prompts, settings(), num_generations=G, seed_key=KEY)
    synced.sync(weights, PolicyVersion(2))
    assert samples(synced.generate(prompts, settings(), num_generations=G, seed_key=KEY)) == expected


def test_an_engine_sleeps_when_it_rests_and_wakes_with_the_newest_weights(
    synced: ColocateEngine,
    model: Any,
    prompts: list[Prompt],
    settings: Callable[..., Sampling],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(synced, "_sleeps", True)
    engine = synced._llm.llm_engine
    first = samples(synced.generate(prompts, settings(), num_generations=G, seed_key=KEY))
    assert not engine.is_sleeping()  # the check of a sync is followed by the samples that it is for
    synced.rest()
    synced.rest()
    assert engine.is_sleeping()
    # Sleep frees nothing on a CPU, so the test takes the weights away itself.
    synced._llm.apply_model(lambda module: [parameter.data.zero_() for parameter in module.parameters()])
    # As in a step that shares its weights with the one before: a second sample without a sync in between.
    assert samples(synced.generate(prompts, settings(), num_generations=G, seed_key=KEY)) == first
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    synced.rest()
    synced.sync(list(model.named_parameters()), PolicyVersion(2))
    assert engine.is_sleeping()  # its cache is still
    synced.rest()
    groups = synced.generate(prompts, settings(), num_generations=G, seed_key=KEY)
    assert largest_difference(groups, model, settings()) < 1e-4
    monkeypatch.undo()
    synced.rest()
    assert not engine.is_sleeping()


def test_the_cache_is_no_larger_than_the_completions_can_fill(engine: ColocateEngine) -> None:
    # Keys and values of 2 layers, 2 heads of width 32, in float32; 2 blocks of 128 tokens hold a sequence, one is never used.
    block = 128 * 2 * 2 * 2 * 32 * 4
    taken = engine._llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes
    assert taken == (1 + SEQUENCES * 2) * block < 1 << 30


def test_a_model_that_vllm_does_not_have_is_one_line(
    engine: ColocateEngine, arguments: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=rf"vLLM does not start with {tmp_path}: "):
        ColocateEngine({**arguments, "model": str(tmp_path)}, tokenizer, bucket_bytes=1, dtype=None, max_num_seqs=1)
