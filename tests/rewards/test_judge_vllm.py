"""The judge against vLLM's own server, as `vllm serve` runs it (the command itself does not start in vLLM's CPU build)."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from optional_packages import needs_vllm
from tiny_models import build_tiny_model
from vllm_server import READY_SECONDS, free_port, remaining

from rewards.chat.client import ChatError
from rewards.judge import Judge

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.e2e]

KEY = "correct-horse"


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a tiny random model is served under the name `tiny`."""
    folder = tmp_path_factory.mktemp("judge")
    model = build_tiny_model(folder / "tiny", hidden_size=128, initializer_range=0.1)
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--api-key", KEY]
    options = [
        "--served-model-name",
        "tiny",
        "--port",
        port,
        "--dtype",
        "float32",
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        64 << 20,
    ]
    variables = {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*map(str, command), *map(str, options)], env={**os.environ, **variables}, stdout=log, stderr=log
        )
    try:
        wait_until_ready(process, url, folder / "log")
        yield f"{url}/v1"
    finally:
        offspring = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait(60)
        for each in remaining(offspring):
            each.kill()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
        assert time.monotonic() < deadline
        try:
            if httpx.get(f"{url}/health", trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)


@pytest.fixture
def parameters(base_url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A tiny random model says anything, so that the server has to hold it to the form."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    form = {"structured_outputs": {"regex": "Score: [0-9]"}}
    return {"base_url": base_url, "model": "tiny", "api_key_env": "JUDGE_KEY", "extra_body": form, "max_tokens": 16}


def judged(parameters: dict[str, Any], texts: list[str], **arguments: Any) -> list[float | None]:
    judge = Judge(**parameters)
    return asyncio.run(judge(prompts=["Ask"] * len(texts), completions=texts, **arguments))


def test_a_real_server_scores_counts_and_is_asked_once(parameters: dict[str, Any], tmp_path: Path) -> None:
    metrics: dict[str, float] = {}
    extras: dict[str, Any] = {}
    parameters = {**parameters, "cache": str(tmp_path / "replies"), "input_price": 1.0, "output_price": 1.0}
    texts = [f"Answer {number}" for number in range(8)]
    first = judged(parameters, texts, log_metric=metrics.__setitem__, log_extra=extras.__setitem__)
    replies = extras["judge_reply"]
    assert first == [int(reply.removeprefix("Score: ")) / 10 for reply in replies]
    assert (metrics["judge/requests"], metrics["judge/unparsed"]) == (8, 0)
    # A byte is a token; the chat template adds some to each question. The end of a reply is one more.
    assert metrics["judge/input_tokens"] > sum(map(len, texts))
    assert metrics["judge/output_tokens"] == sum(len(reply) + 1 for reply in replies)
    assert metrics["judge/cost"] == pytest.approx(
        (metrics["judge/input_tokens"] + metrics["judge/output_tokens"]) / 1e6
    )
    assert judged(parameters, texts, log_metric=metrics.__setitem__) == first
    assert (metrics["judge/requests"], metrics["judge/cache_hits"], metrics["judge/cost"]) == (0, 8, 0)


def test_without_a_form_a_random_model_gives_no_score(parameters: dict[str, Any]) -> None:
    assert judged({**parameters, "extra_body": None}, ["Answer"]) == [None]


def test_what_the_server_refuses_is_told(parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ChatError, match=r"answered 404: .*The model `other` does not exist"):
        judged({**parameters, "model": "other"}, ["Answer"])
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    with pytest.raises(ChatError, match="answered 401: Unauthorized"):
        judged(parameters, ["Answer"])
