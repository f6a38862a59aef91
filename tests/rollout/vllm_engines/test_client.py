"""One server over HTTP, on real sockets: every way to fail is one line, and nothing unsafe is done twice."""

import asyncio
import base64
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from protocol_server import DROP, HANG, TRICKLE, Fault, ProtocolServer, sampled_ids

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.vllm.client import ServerError, ServerTimeoutError, VllmClient
from grpo_cli.types import FinishReason, PolicyVersion

T = TypeVar("T")

BODY = {"prompt": [1, 2], "n": 3, "seed": 5, "logprobs": 0}


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    with ProtocolServer() as started:
        yield started


def ask(
    url: str,
    call: Callable[[VllmClient], Coroutine[Any, Any, T]],
    *,
    token: str | None = None,
    connect_timeout: float = 20.0,
    request_timeout: float = 20.0,
) -> T:
    """Make one call with a client of its own."""

    async def asking() -> T:
        client = VllmClient(url, token, connect_timeout=connect_timeout, request_timeout=request_timeout)
        try:
            return await call(client)
        finally:
            await client.aclose()

    return asyncio.run(asking())


def test_completions_come_in_the_order_of_their_index(server: ProtocolServer) -> None:
    sampled = ask(server.url, lambda client: client.completions(BODY, max_bytes=1000))
    assert [one.ids for one in sampled] == [tuple(sampled_ids(None, [1, 2], 5 + index)) for index in range(3)]
    assert [one.logps for one in sampled] == [tuple(-token / 100 for token in one.ids) for one in sampled]
    assert {one.finish_reason for one in sampled} == {FinishReason.LENGTH}
    [(_, body)] = server.calls
    assert body == {**BODY, "return_token_ids": True, "return_tokens_as_token_ids": True}


def test_a_prompt_with_images_goes_to_a_route_of_its_own_with_each_image_in_base64(server: ProtocolServer) -> None:
    content = bytes(range(256))
    asked = {**BODY, "uid": "0:7", "unexpanded": (1,), "images": (content, b"")}
    sampled = ask(server.url, lambda client: client.completions(asked, max_bytes=1000))
    assert [one.ids for one in sampled] == [tuple(sampled_ids(None, [1, 2], 5 + index)) for index in range(3)]
    [(path, body)] = server.calls
    assert path == "/grpo/completions"
    assert [base64.b64decode(image, validate=True) for image in body["images"]] == [content, b""]
    assert (body["prompt"], body["unexpanded"], body["uid"]) == ([1, 2], [1], "0:7")


def test_a_request_as_long_as_the_server_takes_is_sent_and_a_longer_one_is_not(server: ProtocolServer) -> None:
    asked = {**BODY, "uid": "0:7", "unexpanded": (1,), "images": (b"x" * 300,)}
    ask(server.url, lambda client: client.completions(asked, max_bytes=1000))
    length = server.lengths[-1]
    ask(server.url, lambda client: client.completions(asked, max_bytes=length))
    with pytest.raises(
        TrainingError, match=rf"prompt 0:7 with its images takes {length} bytes; allowed: {length - 1}"
    ) as caught:
        ask(server.url, lambda client: client.completions(asked, max_bytes=length - 1))
    assert "--max-body-mib" in str(caught.value.hint)
    assert not isinstance(caught.value, ServerError)
    with pytest.raises(TrainingError, match=r"a prompt takes \d+ bytes; allowed: 50\n"):
        ask(server.url, lambda client: client.completions(BODY, max_bytes=50))
    assert len(server.calls) == 2


def test_status_is_what_the_server_says(server: ProtocolServer) -> None:
    status = ask(server.url + "/", lambda client: client.status())
    assert (status.instance, status.policy_version, status.checksum) == (server.instance, None, None)
    assert (status.world_size, status.max_model_len, status.max_num_seqs, status.paused) == (1, 512, 8, False)


def test_token_is_sent_with_every_request() -> None:
    with ProtocolServer(token="secret") as server:
        assert ask(server.url, lambda client: client.status(), token="secret").instance == server.instance
        for token in (None, "other"):
            with pytest.raises(TrainingError) as caught:
                ask(server.url, lambda client: client.completions(BODY, max_bytes=1000), token=token)
            assert caught.value.message == (
                f"vLLM server {server.url}: POST /v1/completions: 401, the token is missing or wrong"
            )
            assert caught.value.hint is not None
            assert "vllm.token_file" in caught.value.hint
            assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (500, ServerError, "500, told to answer 500"),
        (503, ServerError, "503, told to answer 503 (its engine is dead, or not ready)"),
        (400, TrainingError, "400, told to answer 400"),
        (DROP, ServerError, "Server disconnected without sending a response"),
        (lambda right: {"choices": right["choices"][1:]}, ServerError, "2 completions instead of 3"),
        (lambda _: b"<html>", ServerError, "an answer that cannot be read: no JSON but '<html>'"),
        (lambda _: {}, ServerError, "an answer that cannot be read: KeyError('choices')"),
        (
            lambda right: {"choices": [{**one, "token_ids": []} for one in right["choices"]]},
            ServerError,
            "an answer that cannot be read: 0 tokens with 5 log-probabilities",
        ),
        (
            lambda right: {"choices": [{**one, "finish_reason": "abort"} for one in right["choices"]]},
            ServerError,
            "an answer that cannot be read: 'abort' is not a valid FinishReason",
        ),
    ],
)
def test_failure_names_address_request_and_answer(
    server: ProtocolServer, fault: Fault, kind: type[TrainingError], said: str
) -> None:
    server.faults["/v1/completions"].append(fault)
    with pytest.raises(TrainingError) as caught:
        ask(
            server.url,
            lambda client: client.completions(BODY, max_bytes=1000),
        )
    assert type(caught.value) in (kind, *kind.__subclasses__())
    assert caught.value.message == f"vLLM server {server.url}: POST /v1/completions: {said}"
    assert server.paths() == ["/v1/completions"]


@pytest.mark.parametrize("fault", [HANG, TRICKLE])
def test_completions_that_take_too_long_are_no_loss_of_a_server_that_lives(
    server: ProtocolServer, fault: Fault
) -> None:
    server.always["/v1/completions"] = fault
    too_late = r"POST /v1/completions: no answer within 0\.3 s \(vllm\.request_timeout\)"
    with pytest.raises(TrainingError, match=f"{too_late}, though it is alive\n") as caught:
        ask(server.url, lambda client: client.completions(BODY, max_bytes=1000), request_timeout=0.3)
    assert not isinstance(caught.value, ServerError)
    assert "raise vllm.request_timeout" in str(caught.value.hint)
    for path, gone in (("/health", 503), ("/health", HANG), ("/grpo/status", DROP)):
        server.always[path] = gone
        with pytest.raises(ServerError, match=f"GET {path}: "):
            ask(
                server.url,
                lambda client: client.completions(BODY, max_bytes=1000),
                request_timeout=0.3,
                connect_timeout=0.5,
            )
        del server.always[path]


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(ServerError) as caught:
            ask(url, lambda client: client.status())
    assert caught.value.message == f"vLLM server {url}: GET /grpo/status: connection refused"


def test_connection_that_never_comes_about_is_given_up_in_time() -> None:
    """A full backlog: the kernel answers no further connection."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        with socket.create_connection(address), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(address)
            begin = time.monotonic()
            with pytest.raises(
                ServerTimeoutError,
                match=r"POST /start_weight_update: no connection within 0\.3 s \(vllm.connect_timeout",
            ):
                ask(
                    f"http://127.0.0.1:{address[1]}",
                    lambda client: client.start_weight_update(),
                    connect_timeout=0.3,
                    request_timeout=60,
                )
            assert time.monotonic() - begin < 20


@pytest.mark.parametrize("answer", [{}, [], {"instance": "x"}, b"hello"])
def test_something_else_that_answers_is_told_from_a_server(server: ProtocolServer, answer: Any) -> None:
    server.always["/grpo/status"] = lambda _: answer
    with pytest.raises(TrainingError, match="it answers, but is no `grpo vllm-serve`"):
        ask(server.url, lambda client: client.status())
    server.always["/grpo/status"] = 404
    with pytest.raises(TrainingError, match=r"it answers, but is no `grpo vllm-serve` \(GET /grpo/status: 404, told"):
        ask(server.url, lambda client: client.status())


@pytest.mark.parametrize("call", [VllmClient.pause, VllmClient.resume, VllmClient.reset_prefix_cache])
def test_broken_connection_is_tried_again_where_that_does_nothing_more(
    server: ProtocolServer, call: Callable[[VllmClient], Coroutine[Any, Any, None]]
) -> None:
    path = f"/{call.__name__}"
    server.faults[path].extend([DROP, DROP])
    ask(server.url, call)
    assert server.paths() == [path] * 3
    server.always[path] = DROP
    with pytest.raises(ServerError, match=path):
        ask(server.url, call)


@pytest.mark.parametrize("fault", [DROP, 500])
@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/init_weight_transfer_engine", lambda client: client.init_weight_transfer({})),
        ("/update_weights", lambda client: client.update_weights({})),
        ("/finish_weight_update", lambda client: client.finish_weight_update(PolicyVersion(1))),
    ],
)
def test_weights_are_never_sent_twice(
    server: ProtocolServer, fault: Fault, path: str, call: Callable[[VllmClient], Coroutine[Any, Any, None]]
) -> None:
    server.always[path] = fault
    with pytest.raises(ServerError):
        ask(server.url, call)
    assert server.paths() == [path]


def test_update_that_an_earlier_trainer_left_unfinished_is_ended(server: ProtocolServer) -> None:
    server.paused = True
    server.faults["/start_weight_update"].append(500)
    ask(server.url, lambda client: client.start_weight_update())
    assert server.paths() == ["/start_weight_update", "/update_weights", "/start_weight_update"]
    assert ("/update_weights", {"update_info": {"abandon": True}}) in server.calls


def test_prefix_cache_that_was_not_reset_is_a_failure(server: ProtocolServer) -> None:
    server.always["/reset_prefix_cache"] = lambda _: {"success": False}
    with pytest.raises(ServerError, match="it did not forget the keys and values"):
        ask(server.url, lambda client: client.reset_prefix_cache())
    server.always["/reset_prefix_cache"] = lambda _: b""  # as earlier versions of vLLM answer
    ask(server.url, lambda client: client.reset_prefix_cache())


def test_environment_does_not_lead_requests_elsewhere(server: ProtocolServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert ask(server.url, lambda client: client.status()).instance == server.instance
