"""The route of prompts with images, through the gate and a real HTTP server's worth of ASGI, without vLLM: what may come in, and when it ends."""

import asyncio
import base64
import http.server
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from vision_prompts import PICTURES

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.vllm.limits import AFTER_IMAGES, Limits
from grpo_cli.rollout.vllm.middleware import Gate, Message, Receive, Scope, Send
from grpo_cli.rollout.vllm.prompt_images import ImagePrompt

LOCAL = [(b"host", b"127.0.0.1:8000")]
PROMPT = {"uid": "0:1", "prompt": [1, 2, 2], "unexpanded": [1, 2], "n": 2}


class Opening:
    """An engine that opens the images of a prompt, as the served one does, and says how large they are."""

    def __init__(self) -> None:
        self.cancelled = False

    def description(self, scope: Scope) -> dict[str, Any]:  # noqa: ARG002  as in the protocol
        return {}

    async def complete(self, scope: Scope, asked: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        if asked.get("endless"):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        prompt = ImagePrompt.from_request(asked)
        with prompt.explained():
            images = prompt.opened()["multi_modal_data"]["image"]
        if [image.size for image in images] == [(1, 1)]:
            raise TrainingError("prompt 0:1: too small", hint="look closer")
        return {"sizes": [image.size for image in images]}

    async def settle(self, scope: Scope) -> None:
        """There is nothing to do."""

    async def checksum(self, scope: Scope) -> str | None:  # noqa: ARG002
        return None


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("this is no route of vLLM's")


def gate(engine: Opening) -> Gate:
    limits = Limits(max_body_bytes=1 << 20, max_num_generations=2)
    return Gate(nothing, token=None, limits=limits, engine=engine)


def ask(**changes: Any) -> httpx.Response:
    async def asking() -> httpx.Response:
        transport = httpx.ASGITransport(gate(Opening()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.post(AFTER_IMAGES, json={**PROMPT, **changes})

    return asyncio.run(asking())


def in_base64(*images: bytes) -> list[str]:
    return [base64.b64encode(image).decode() for image in images]


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 400
    text: str = answer.json()["error"]["message"]
    return text


def test_images_are_opened_in_their_order() -> None:
    answer = ask(images=in_base64(*PICTURES[:2]))
    assert (answer.status_code, answer.json()) == (200, {"sizes": [[24, 16], [10, 30]]})


@pytest.fixture
def picture_server() -> Iterator[tuple[str, list[str]]]:
    """An address with a picture, and what was asked of it."""
    asked: list[str] = []

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PICTURES[0])

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is the base class's
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/picture.png", asked
        server.shutdown()


def test_no_path_and_no_address_is_ever_opened(picture_server: tuple[str, list[str]], tmp_path: Path) -> None:
    """Each leads to a picture, which a server that opened it would find."""
    address, asked = picture_server
    path = tmp_path / "picture.png"
    path.write_bytes(PICTURES[0])
    data = f"data:image/png;base64,{in_base64(PICTURES[0])[0]}"
    named: list[Any] = [address, str(path), f"file://{path}", data]
    for name in named:
        assert "each in base64" in said(ask(images=[name])), name
        assert "an image cannot be read" in said(ask(images=in_base64(name.encode()))), name
        for form in ({"url": name}, {"type": "image_url", "image_url": {"url": name}}, {"path": name}, [name]):
            assert "each in base64" in said(ask(images=[form])), form
    for beside in (
        {"multi_modal_data": {"image": address}},
        {"content_parts": [{"type": "image_url", "url": address}]},
    ):
        assert "each in base64" in said(ask(**beside)), beside
    assert asked == []
    httpx.get(address, trust_env=False)
    assert asked == ["/picture.png"]


def test_what_is_a_program_for_another_program_is_no_image() -> None:
    assert "an image cannot be read" in said(
        ask(images=in_base64(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n"))
    )


def test_many_images_that_would_fill_the_memory_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = 24 * 16 + 10 * 30
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", pixels)
    assert ask(images=in_base64(*PICTURES[:2])).status_code == 200
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", pixels - 1)
    assert "they have more than 683 pixels" in said(ask(images=in_base64(*PICTURES[:2])))


def test_an_image_that_would_fill_the_memory_is_refused_by_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's bound, at a size that a test can have."""
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 100)
    assert "exceeds limit of 200 pixels" in said(ask(images=in_base64(PICTURES[0])))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "images: allowed: a list of image files"),
        ({"images": []}, "images: allowed: a list of image files"),
        ({"images": "aGVsbG8="}, "images: allowed: a list of image files"),
        ({"images": ["aGVs\nbG8="]}, "images: allowed: a list of image files"),
        ({"images": ["é"]}, "images: allowed: a list of image files"),
        ({"images": [None]}, "images: allowed: a list of image files"),
        (
            {"images": in_base64(PICTURES[0][:40])},
            "prompt 0:1: vLLM does not take its images: an image cannot be read: ",
        ),
        ({"unexpanded": [1, "2"]}, "`unexpanded`, lists of token ids"),
        ({"unexpanded": [1, True]}, "`unexpanded`, lists of token ids"),
        ({"uid": 3}, "has `uid`, a text"),
        ({"prompt": "text"}, "prompt: allowed: one prompt, as a list of token ids"),
        ({"n": 3}, "n is 3; allowed: up to 2"),
    ],
)
def test_what_is_wrong_with_a_request_is_told_in_a_line(changes: dict[str, Any], told: str) -> None:
    message = said(ask(**changes))
    assert told in message
    assert "\n" not in message


def test_a_hint_comes_with_the_error() -> None:
    gif = base64.b64decode("R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7")  # one pixel
    assert said(ask(images=in_base64(gif))) == "prompt 0:1: too small (look closer)"


def test_work_ends_when_its_client_leaves() -> None:
    engine = Opening()

    async def asking() -> None:
        messages: Iterator[Message] = iter([{"type": "http.request", "body": b'{"prompt": [1], "endless": true}'}])

        async def receive() -> Message:
            await asyncio.sleep(0.05)
            return next(messages, {"type": "http.disconnect"})

        async def send(message: Message) -> None:
            raise AssertionError("nobody is there")

        app = gate(engine)
        await asyncio.wait_for(
            app({"type": "http", "method": "POST", "path": AFTER_IMAGES, "headers": LOCAL}, receive, send), 5
        )
        await asyncio.sleep(0)  # the work is told, and may look

    asyncio.run(asking())
    assert engine.cancelled
