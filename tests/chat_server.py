"""A small HTTP server, in a thread and on a real socket, that answers as a chat server does, and badly if told to."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

DROP = "drop"
"""Close the connection without an answer."""
HANG = "hang"
"""Answer late."""
DRIP = "drip"
"""Answer as late, but begin at once."""
HANG_SECONDS = 3.0

Fault = str | bytes | int | tuple[int, Mapping[str, str]]
"""One of the above, a body, a status code, or a code with headers."""


class ChatServer:
    """The server; a context manager.

    Args:
        answer: What it replies to a question.
    """

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.answer = answer
        self.faults: deque[Fault] = deque()
        """What goes wrong with the next requests, in turn."""
        self.finish_reason = "stop"
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.times: list[float] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.chat_server = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def reply(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the last message, and count words as tokens."""
        question = body["messages"][-1]["content"]
        text = self.answer(question)
        return {
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": self.finish_reason}
            ],
            "usage": {"prompt_tokens": len(question.split()), "completion_tokens": len(text.split())},
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> ChatServer:
        owner: ChatServer = self.server.chat_server  # type: ignore[attr-defined]
        return owner

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is the base class's
        """Say nothing."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        owner = self.owner
        with owner.lock:
            owner.bodies.append(body)
            owner.headers.append(dict(self.headers))
            owner.times.append(time.monotonic())
            owner.at_once += 1
            owner.most_at_once = max(owner.most_at_once, owner.at_once)
            fault = owner.faults.popleft() if owner.faults else None
        try:
            self._answer(body, fault)
        finally:
            with owner.lock:
                owner.at_once -= 1

    def _answer(self, body: Mapping[str, Any], fault: Fault | None) -> None:
        if self.path != "/v1/chat/completions":
            fault = 404
        if fault == DROP:
            self.close_connection = True
            return
        if fault == HANG:
            time.sleep(HANG_SECONDS)
        if fault == DRIP:
            self._drip()
        elif isinstance(fault, bytes):
            self._send(200, fault)
        elif isinstance(fault, int | tuple):
            code, headers = fault if isinstance(fault, tuple) else (fault, {})
            message = f"told to answer {code} to {self.headers.get('authorization')}"
            self._send(code, json.dumps({"error": {"message": message}}).encode(), headers)
        else:
            time.sleep(0.02)  # so that others come meanwhile
            self._send(200, json.dumps(self.owner.reply(body)).encode())

    def _drip(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "20")
        self.end_headers()
        try:
            for _ in range(20):
                self.wfile.write(b" ")
                time.sleep(HANG_SECONDS / 20)
        except OSError:  # who asked has gone
            self.close_connection = True

    def _send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        try:
            self.send_response(status)
            for name, value in {**(headers or {}), "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # who asked has gone
            self.close_connection = True
