"""A small HTTP server, in a thread and on a real socket, that speaks what `grpo vllm-serve` speaks, and badly if told to.

It samples from no model: a token is a function of the weights' checksum, the prompt, the seed and the position, so that a test
knows every completion beforehand. Weights arrive through the project's own receiving ends.
"""

import hashlib
import json
import select
import socket
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

import torch

from grpo_cli import __version__
from grpo_cli.rollout.sync.buckets import unpack
from grpo_cli.rollout.sync.checksum import Checksum
from grpo_cli.rollout.sync.transports import BucketSource, build_source

DROP = "drop"
"""Close the connection without an answer."""
HANG = "hang"
"""Answer nothing until the client goes away."""
TRICKLE = "trickle"
"""Send a byte from time to time, and never an end."""

Fault = str | int | Callable[[Any], Any]
"""One of the above, a status code, or a function of the right answer."""

NUM_TOKENS = 5


class ProtocolServer:
    """The server; a context manager.

    Args:
        token: That requests must bear.
        world_size: Processes that take weights, here threads.
        max_model_len: What it says of itself.
        max_num_seqs: Likewise.
        max_lora_rank: Likewise.
        max_body_bytes: Likewise.
        max_images: Likewise.
        image_options: Likewise.
        seconds: That a completion request takes.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        world_size: int = 1,
        max_model_len: int = 512,
        max_num_seqs: int = 8,
        max_lora_rank: int = 0,
        max_body_bytes: int = 1 << 20,
        max_images: int = 0,
        image_options: Mapping[str, Any] | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.token, self.seconds = token, seconds
        self.world_size, self.max_model_len, self.max_num_seqs = world_size, max_model_len, max_num_seqs
        self.max_lora_rank, self.max_body_bytes = max_lora_rank, max_body_bytes
        self.max_images, self.image_options = max_images, image_options or {}
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        """What goes wrong with the next requests for a path, in turn."""
        self.always: dict[str, Fault] = {}
        """What goes wrong with every request for a path."""
        self.calls: list[tuple[str, Any]] = []
        self.lengths: list[int] = []
        """Of the bodies of these calls."""
        self.left: list[str] = []
        """Paths of requests whose client went away before the answer."""
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.connections: list[socket.socket] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.sums: list[Checksum] = []
        self.sources: list[BucketSource] = []
        self.restart()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.protocol_server = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def restart(self) -> None:
        """Forget everything, as a server that was started again has."""
        self.instance = uuid.uuid4().hex
        self.version: int | None = None
        self.checksum: str | None = None
        self.paused = False
        self.sources = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Listen no more and break all connections, as the end of a process does."""
        self._http.shutdown()
        self._http.server_close()
        for connection in self.connections:
            with suppress(OSError):  # closed long ago
                connection.shutdown(socket.SHUT_RDWR)

    def paths(self) -> list[str]:
        """Paths that were asked for, in order, without those that only look."""
        return [path for path, _ in self.calls if path not in ("/grpo/status", "/health")]

    def answer(self, path: str, body: Any) -> Any:
        """Do what a path stands for.

        Raises:
            LookupError: If it stands for nothing.
        """
        match path:
            case "/grpo/status":
                return self._status()
            case "/v1/completions" | "/grpo/completions":
                return self._complete(body)
            case "/health" | "/pause" | "/resume":
                self.paused = {"/pause": True, "/resume": False}.get(path, self.paused)
            case "/init_weight_transfer_engine":
                self.sources = self._each(lambda rank: _source(body["init_info"], rank), range(self.world_size))
            case "/start_weight_update":
                assert self.paused
                self.version = self.checksum = None
                self.sums = [Checksum() for _ in self.sources]
                self.weights = [{} for _ in self.sources]
            case "/update_weights":
                self._each(lambda rank: self._take(rank, body["update_info"]), range(len(self.sources)))
            case "/finish_weight_update":
                [self.checksum] = {checksum.value for checksum in self.sums}
                self.version = int(body["weight_version"])
            case "/reset_prefix_cache":
                return {"success": True}
            case _:
                raise LookupError(path)
        return {}

    def _status(self) -> Any:
        return {
            "instance": self.instance,
            "grpo": __version__,
            "model": "tiny",
            "sizes": {"vocab_size": 264, "hidden_size": 32},
            "policy_version": self.version,
            "checksum": self.checksum,
            "paused": self.paused,
            "world_size": self.world_size,
            "vllm": "0",
            "device": "cpu",
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_generations": 64,
            "max_body_bytes": self.max_body_bytes,
            "max_images": self.max_images,
            "image_options": self.image_options,
            "max_lora_rank": self.max_lora_rank,
            "dtype": "float32",
        }

    def _each(self, work: Callable[[int], Any], ranks: Sequence[int]) -> list[Any]:
        """Do something as every process of the server would, at the same time."""
        with ThreadPoolExecutor(max(1, len(ranks))) as pool:
            return list(pool.map(work, ranks))

    def _take(self, rank: int, info: dict[str, Any]) -> None:
        bucket = self.sources[rank].receive(info)
        self.sums[rank].add(bucket)
        self.weights[rank].update({name: tensor.clone() for name, tensor in unpack(bucket)})

    def _complete(self, body: dict[str, Any]) -> Any:
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds)
        with self.lock:
            self.at_once -= 1
        choices = [
            {
                "index": index,
                "token_ids": ids,
                "logprobs": {"token_logprobs": [-token / 100 for token in ids]},
                "finish_reason": "length",
            }
            for index in range(body["n"])
            for ids in [sampled_ids(self.checksum, body["prompt"], body["seed"] + index)]
        ]
        return {"choices": choices[::-1]}  # their order says nothing, their index does


def _source(info: dict[str, Any], rank: int) -> BucketSource:
    return build_source(info, rank=rank, device=torch.device("cpu"))


def sampled_ids(checksum: str | None, prompt: Sequence[int], seed: int) -> list[int]:
    """Give the tokens (letters of the tiny tokenizer) that a server samples."""
    drawn = hashlib.sha256(json.dumps([checksum, list(prompt), seed]).encode()).digest()
    return [97 + byte % 26 for byte in drawn[:NUM_TOKENS]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> ProtocolServer:
        owner: ProtocolServer = self.server.protocol_server  # type: ignore[attr-defined]
        return owner

    def setup(self) -> None:
        super().setup()
        self.owner.connections.append(self.connection)

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is the base class's
        """Say nothing."""

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.loads(raw) if raw else None
        with self.owner.lock:
            self.owner.calls.append((path, body))
            self.owner.lengths.append(len(raw))
            faults = self.owner.faults[path]
            fault = faults.popleft() if faults else self.owner.always.get(path)
        if self.owner.token is not None and self.headers.get("authorization") != f"Bearer {self.owner.token}":
            fault = 401
        if fault in (DROP, HANG, TRICKLE):
            self.close_connection = True
            if fault == TRICKLE:
                self._trickle()
            elif fault == HANG:
                self._wait_for_leave(path)
            return
        if isinstance(fault, int):
            self._send(fault, {"error": {"message": f"told to answer {fault}\nand more"}})
            return
        try:
            right = self.owner.answer(path, body)
        except LookupError:
            self._send(404, {"error": "no such path"})
            return
        except Exception as error:  # noqa: BLE001  as a web framework does
            self._send(500, {"error": repr(error)})
            return
        self._send(200, fault(right) if callable(fault) else right)

    def _send(self, status: int, content: Any) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _wait_for_leave(self, path: str) -> None:
        select.select([self.connection], [], [], 30)
        if self.connection.recv(1, socket.MSG_PEEK) == b"":
            self.owner.left.append(path)

    def _trickle(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        for _ in range(100):
            try:
                self.wfile.write(b" ")
            except OSError:
                return
            time.sleep(0.1)
