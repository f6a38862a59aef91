"""One real `grpo vllm-serve` from its first line to its last, and others that are killed in every way."""

import asyncio
import base64
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from optional_packages import needs_vllm
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM
from vision_prompts import PICTURES
from vllm_server import TOKEN, VllmServer, engine_of, remaining

from grpo_cli import __version__
from grpo_cli.rollout.vllm.served_process import ServedEngine

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.e2e]

ADMIN = (
    "/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/reset_prefix_cache",
)  # fmt: skip

SMALL_CACHE = ("--engine", f"kv_cache_memory_bytes={1 << 28}")
"""vLLM fills it with zeros at the start."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of a width that vLLM's CPU attention takes."""
    return build_tiny_model(tmp_path_factory.mktemp("served") / "tiny", hidden_size=128, initializer_range=0.1)


@pytest.fixture(scope="module")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    options = ("--max-num-generations", "16", *SMALL_CACHE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "0")  # as users have it
        server = VllmServer(tmp_path_factory.mktemp("server"), model_folder, *options)
    with server:
        server.wait_until_ready()
        yield server


@pytest.mark.usefixtures("served")
class TestServed:
    """One real server; the last test ends it."""

    def test_the_lines_say_what_happens(self, served: VllmServer, model_folder: Path) -> None:
        first, *between, last = served.lines
        assert first.startswith("starting vLLM ")
        assert first.endswith(f" for {model_folder} on {served.url} (log: {served.log})")
        assert last.startswith(f"ready: {served.url} (")
        assert all(line.endswith(" s") for line in between)
        assert served.errors == []

    def test_completions_are_token_ids_with_log_probabilities_and_a_reason(
        self, served: VllmServer, model_folder: Path
    ) -> None:
        prompt = [72, 101, 108, 108, 111]
        body = {
            "prompt": prompt, "n": 4, "max_tokens": 8, "temperature": 1.0, "seed": 3, "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
        choices = served.ask("POST", "/v1/completions", json=body).json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
        for choice in choices:
            ids = choice["token_ids"]
            assert choice["finish_reason"] in ("stop", "length")
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            true = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), true, atol=1e-3, rtol=0)

    def test_every_route_but_health_wants_the_token(self, served: VllmServer) -> None:
        assert served.ask("GET", "/health", headers={}).status_code == 200
        for path in ADMIN:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                assert served.ask("POST", path, headers=headers).status_code == 401, path
        for path in ("/grpo/status", "/metrics", "/version", "/v1/models"):
            assert served.ask("GET", path, headers={}).status_code == 401, path
            assert served.ask("GET", path).status_code == 200, path

    def test_what_is_not_for_training_does_not_exist(self, served: VllmServer) -> None:
        for path in (
            "/collective_rpc",
            "/sleep",
            "/shutdown_weight_transfer_engine",
            "/v1/load_lora_adapter",
            "/invocations",
            "/v1/chat/completions",
        ):
            assert served.ask("POST", path, json={}).status_code == 404, path
        assert served.ask("GET", "/docs").status_code == 404

    def test_too_much_is_refused(self, served: VllmServer) -> None:
        answer = served.ask("POST", "/v1/completions", json={"prompt": [1], "n": 17})
        assert (answer.status_code, "up to 16" in answer.text) == (400, True)
        assert served.ask("POST", "/v1/completions", json={"prompt": [[1], [2]]}).status_code == 400
        answer = served.ask("POST", "/v1/completions", content=b"x" * ((64 << 20) + 1))
        assert answer.status_code == 413

    def test_a_model_that_reads_text_takes_no_images(self, served: VllmServer) -> None:
        body = {"uid": "0:1", "prompt": [1, 2], "unexpanded": [1], "images": [base64.b64encode(PICTURES[0]).decode()]}
        answer = served.ask("POST", "/grpo/completions", json=body)
        assert (
            answer.status_code,
            "prompt 0:1: it has images, and vLLM runs a model that reads text only" in answer.text,
        ) == (400, True)
        answer = served.ask("POST", "/grpo/completions", json={**body, "seed": 1 << 63})
        assert (answer.status_code, "prompt 0:1: seed: found 9223372036854775808" in answer.text) == (400, True)
        status = served.ask("GET", "/grpo/status").json()
        assert (status["max_images"], status["image_options"]) == (0, {})

    def test_pauses_are_told_and_work(self, served: VllmServer) -> None:
        assert served.ask("POST", "/pause", params={"mode": "wait"}).status_code == 200
        assert served.ask("GET", "/grpo/status").json()["paused"]
        assert served.ask("POST", "/resume").status_code == 200
        assert not served.ask("GET", "/grpo/status").json()["paused"]

    def test_status_answers_while_completions_are_sampled(self, served: VllmServer) -> None:
        body = {"prompt": [72, 105], "n": 16, "max_tokens": 100, "ignore_eos": True}
        waits = []
        # One client: to make one takes so long that it would be measured.
        with (
            httpx.Client(base_url=served.url, headers=served.headers, timeout=120, trust_env=False) as client,
            ThreadPoolExecutor(16) as pool,
        ):
            sampling = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(16)]
            while not all(each.done() for each in sampling):
                began = time.monotonic()
                status = client.get("/grpo/status").json()
                waits.append(time.monotonic() - began)
                time.sleep(0.05)
            answers = [each.result() for each in sampling]
        assert [answer.status_code for answer in answers] == [200] * 16
        assert len(waits) > 3
        assert max(waits) < 10
        assert status == status | {
            "policy_version": None, "checksum": None, "paused": False, "world_size": 1, "device": "cpu", "max_model_len": 512,
            "dtype": "float32", "max_num_generations": 16, "grpo": __version__,
        }  # fmt: skip
        assert {"instance", "model", "vllm", "max_num_seqs"} <= set(status)

    def test_the_token_is_in_no_command_line_and_not_in_the_log(self, served: VllmServer) -> None:
        commands = [" ".join(process.cmdline()) for process in served.offspring()]
        assert any("served_process" in command for command in commands)
        assert not any(TOKEN in command for command in commands)
        assert TOKEN not in served.log.read_text()

    def test_sigterm_ends_all_of_it(self, served: VllmServer) -> None:
        offspring = served.offspring()
        served.process.terminate()
        assert served.wait() == 143
        assert served.errors == ["stopped by SIGTERM"]
        assert remaining(offspring, 0) == []


class Copies:
    """What vLLM makes of copies of the model, with the real extension of its workers: all are asked, the first one answers."""

    def __init__(self, *checksums: str | None) -> None:
        from grpo_cli.rollout.vllm.weight_transfer import ReceivedWeights
        from grpo_cli.rollout.vllm.worker_extension import WorkerExtension

        self.workers = [WorkerExtension() for _ in checksums]
        for worker, checksum in zip(self.workers, checksums, strict=True):
            received = None if checksum is None else ReceivedWeights(checksum=checksum, tensors=1, bytes=4)
            worker.weight_transfer_engine = SimpleNamespace(received=received)  # type: ignore[assignment]

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers][:1]


@pytest.mark.parametrize(
    ("checksums", "told"),
    [
        (("a",), "a"),
        (("a", "a", "a"), "a"),
        ((None, None), None),
        (("a", "b"), "a in the first copy of the model; another: a worker has weights with checksum b instead of a"),
        (
            ("a", None),
            "a in the first copy of the model; another: a worker has weights with checksum None instead of a",
        ),
    ],
)
def test_a_checksum_is_that_of_all_copies_of_the_model(checksums: tuple[str | None, ...], told: str | None) -> None:
    client = Copies(*checksums)
    scope = {"app": SimpleNamespace(state=SimpleNamespace(engine_client=client))}
    assert asyncio.run(ServedEngine().checksum(scope)) == told


class TestKilled:
    """`kill -9`, which nothing can catch; that of the supervisor alone is in `test_server_engine_real`, where a trainer notices it."""

    @pytest.mark.parametrize("who", ["supervisor and server", "engine"])
    def test_nothing_stays(self, who: str, model_folder: Path, tmp_path: Path) -> None:
        server = VllmServer(tmp_path, model_folder, *SMALL_CACHE)
        try:
            server.wait_until_ready()
            offspring = server.offspring()
            victims = {
                "supervisor and server": [server.process.pid, offspring[0].pid],
                "engine": [engine_of(offspring[0]).pid],
            }[who]
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            code = server.wait()
            assert remaining(offspring) == []
            if who == "engine":
                assert code == 4
                assert server.errors[0].startswith("error: vLLM")
        finally:
            server.process.kill()
            server.wait()

    def test_an_engine_that_cannot_start_is_told_by_its_own_error(self, model_folder: Path, tmp_path: Path) -> None:
        server = VllmServer(
            tmp_path, model_folder, "--engine", "kv_cache_memory_bytes=1000", "--max-model-length", "512"
        )
        assert server.wait() == 4
        said = "\n".join(server.errors)
        assert said.startswith("error: vLLM ended with exit code 1")
        assert "ValueError: " in said
        assert "cache" in said
        assert str(server.log) in said
