"""Sampling by a real `grpo vllm-serve`: the weights that were sent are the weights that sample."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
import torch
from optional_packages import needs_vllm
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM
from vllm_server import TOKEN, VllmServer, remaining
from warm_start import WarmStart

from grpo_cli.errors import Interrupted
from grpo_cli.rollout.sync.transports import ProcessGroupTransport, SharedMemoryTransport, WeightTransport
from grpo_cli.rollout.vllm.client import ServerError, VllmClient
from grpo_cli.rollout.vllm.fit import Needs
from grpo_cli.rollout.vllm.server_engine import ServerEngine
from grpo_cli.types import Completion, PolicyVersion, Prompt, Sampling

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.e2e]

KEY = (0, "train", 1)
TOLERANCE = 1e-3
"""Of log-probabilities in float32; 6e-5 was seen."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three tiny models with other weights, of a width that vLLM's CPU attention takes."""
    root = tmp_path_factory.mktemp("served")
    return [build_tiny_model(root / str(seed), hidden_size=128, seed=seed, initializer_range=0.1) for seed in range(3)]


@pytest.fixture(scope="module")
def served(
    folders: list[Path], tmp_path_factory: pytest.TempPathFactory, warm_server: WarmStart
) -> Iterator[VllmServer]:
    """A server of the first model. The last test kills it."""
    options = (
        "--max-model-length",
        "256",
        "--engine",
        "max_num_seqs=16",
        "--engine",
        f"kv_cache_memory_bytes={1 << 26}",
    )
    with VllmServer(tmp_path_factory.mktemp("log"), folders[0], *options, warm=warm_server) as server:
        yield server


@pytest.fixture
def build(served: VllmServer, tokenizer: Any) -> Iterator[Callable[..., ServerEngine]]:
    """Make engines that sample from the server."""
    engines: list[ServerEngine] = []

    def build(transport: WeightTransport | None = None) -> ServerEngine:
        engine = ServerEngine(
            [VllmClient(served.url, TOKEN, connect_timeout=10, request_timeout=120)],
            tokenizer,
            transport=transport or SharedMemoryTransport(),
            bucket_bytes=1 << 18,
            dtype=torch.float32,
            needs=Needs(longest=256),
        )
        engines.append(engine)
        engine.wait_until_ready(300, on_wait=still_starting)
        return engine

    def still_starting(line: str) -> None:
        assert served.process.poll() is None, line

    yield build
    for engine in engines:
        engine.close()


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Name the weights as the checkpoint does, which has a tied head once."""
    return [(name, tensor.detach()) for name, tensor in model.named_parameters()]


def true_logps(model: Any, prompt: Prompt, completion: Completion, temperature: float) -> torch.Tensor:
    """Compute the completion's log-probabilities with transformers."""
    ids = torch.tensor([[*prompt.ids, *completion.ids]])
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits[0, len(prompt.ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(prompt.ids) :, None])[:, 0]


@pytest.mark.parametrize("kind", ["shared_memory", "process_group"])
def test_what_was_sent_samples(
    folders: list[Path], build: Callable[..., ServerEngine], prompts: list[Prompt], kind: str
) -> None:
    sampling = Sampling(stop_ids=(257,), max_tokens=24, temperature=0.8)
    transport: WeightTransport = SharedMemoryTransport()
    if kind == "process_group":
        transport = ProcessGroupTransport(host="127.0.0.1", port=0, device=torch.device("cpu"), timeout_seconds=60)
    engine = build(transport)
    for version, folder in enumerate(folders[1:], start=1):
        model = load(folder)
        report = engine.sync(weights_of(model), PolicyVersion(version))
        assert report.bytes >= sum(tensor.numel() * 4 for _, tensor in weights_of(model))
        groups = engine.generate(prompts, sampling, num_generations=4, seed_key=KEY)
        assert [group.prompt for group in groups] == prompts
        for group in groups:
            assert len({one.ids for one in group.completions}) > 1
            for one in group.completions:
                assert one.policy_version == version
                expected = true_logps(model, group.prompt, one, sampling.temperature)
                torch.testing.assert_close(one.logps, expected, atol=TOLERANCE, rtol=0)


def test_samples_depend_on_seed_prompt_and_index_alone(
    folders: list[Path], build: Callable[..., ServerEngine], prompts: list[Prompt]
) -> None:
    sampling = Sampling(stop_ids=(257,), max_tokens=16)
    engine = build()
    engine.sync(weights_of(load(folders[1])), PolicyVersion(1))
    first = engine.generate(prompts, sampling, num_generations=4, seed_key=KEY)
    again = engine.generate(prompts[::-1], sampling, num_generations=4, seed_key=KEY)[::-1]
    other = engine.generate(prompts, sampling, num_generations=4, seed_key=(1, "train", 1))
    ids = [[[one.ids for one in group.completions] for group in groups] for groups in (first, again, other)]
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]


def test_interrupted_generation_ends_at_once_and_the_server_stops_sampling(
    folders: list[Path], served: VllmServer, build: Callable[..., ServerEngine], prompts: list[Prompt]
) -> None:
    engine = build()
    engine.sync(weights_of(load(folders[1])), PolicyVersion(1))
    endless = Sampling(stop_ids=(257,), max_tokens=200, min_tokens=200)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    begin = time.monotonic()
    try:
        with pytest.raises(Interrupted):
            engine.generate(prompts * 20, endless, num_generations=8, seed_key=KEY)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begin < 10
    deadline = time.monotonic() + 10
    while running(served) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert running(served) == 0


def running(served: VllmServer) -> float:
    """Ask how many completions it samples or has waiting."""
    answer = httpx.get(f"{served.url}/metrics", headers=served.headers, trust_env=False)
    lines = [line for line in answer.text.splitlines() if line.startswith("vllm:num_requests_")]
    assert lines
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_next_trainer_attaches_to_a_server_whose_trainer_died_between_two_buckets(
    folders: list[Path], served: VllmServer, build: Callable[..., ServerEngine], prompts: list[Prompt]
) -> None:
    with httpx.Client(base_url=served.url, headers=served.headers, timeout=60) as http:
        for path, body in (
            ("/pause?mode=wait", None),
            ("/init_weight_transfer_engine", {"init_info": {"transport": "shared_memory"}}),
            ("/start_weight_update", None),
        ):
            http.post(path, json=body).raise_for_status()
        assert http.post("/start_weight_update").is_server_error  # this is what blocks the next
    engine = build()
    model = load(folders[2])
    engine.sync(weights_of(model), PolicyVersion(7))
    (group,) = engine.generate(prompts[:1], Sampling(stop_ids=(257,), max_tokens=8), num_generations=2, seed_key=KEY)
    for one in group.completions:
        torch.testing.assert_close(one.logps, true_logps(model, prompts[0], one, 1.0), atol=TOLERANCE, rtol=0)


def test_a_killed_server_is_an_error_within_seconds_and_nothing_of_it_stays(
    folders: list[Path], served: VllmServer, build: Callable[..., ServerEngine], prompts: list[Prompt]
) -> None:
    engine = build()
    engine.sync(weights_of(load(folders[1])), PolicyVersion(1))
    offspring = served.offspring()
    served.process.kill()
    begin = time.monotonic()
    with pytest.raises(ServerError, match=f"vLLM server {served.url}: "):
        engine.generate(
            prompts * 20, Sampling(stop_ids=(257,), max_tokens=200, min_tokens=200), num_generations=8, seed_key=KEY
        )
    assert time.monotonic() - begin < 30
    served.wait()
    assert len(offspring) > 1
    assert remaining(offspring) == []
