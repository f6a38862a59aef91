"""Sampling by servers, over real sockets to servers whose every completion is known, and which fail in every way."""

import re
import signal
import threading
import time
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from protocol_server import DROP, HANG, NUM_TOKENS, Fault, ProtocolServer
from server_engines import KEY, SAMPLING, Build, Serve, expected_ids, generate, ids_of, many, synced, weights

from grpo_cli.errors import Interrupted, TrainingError
from grpo_cli.rollout.engine import EngineLostError
from grpo_cli.rollout.vllm.client import ServerError
from grpo_cli.types import Group, PolicyVersion, Sampling


@pytest.mark.parametrize("number_of_servers", [1, 2, 3])
def test_completions_do_not_depend_on_which_server_answers(
    serve: Serve, build: Build, tokenizer: Any, number_of_servers: int
) -> None:
    servers = [serve(max_num_seqs=3, seconds=0.01) for _ in range(number_of_servers)]
    tokens: list[int] = []
    engine = synced(build(*servers, on_progress=tokens.append), version=4)
    prompts = many(12)
    groups = generate(engine, prompts)
    assert ids_of(groups) == expected_ids(prompts, servers[0].checksum, 3)
    assert [group.prompt for group in groups] == prompts
    assert {one.policy_version for group in groups for one in group.completions} == {4}
    assert [[one.index for one in group.completions] for group in groups] == [[0, 1, 2]] * 12
    assert groups[0].completions[1].text == tokenizer.decode(groups[0].completions[1].ids)
    assert groups[0].completions[0].logps.tolist() == pytest.approx(
        [-token / 100 for token in groups[0].completions[0].ids]
    )
    assert tokens == [3 * NUM_TOKENS] * 12
    assert all("/v1/completions" in server.paths() for server in servers)


def test_no_prompts_are_no_requests(serve: Serve, build: Build) -> None:
    server = serve()
    engine = synced(build(server))
    before = len(server.calls)
    assert generate(engine, []) == []
    assert len(server.calls) == before


def test_groups_are_told_as_soon_as_they_are_complete(serve: Serve, build: Build) -> None:
    slow, fast = serve(max_num_seqs=2, seconds=0.5), serve(max_num_seqs=2, seconds=0.01)
    told: list[tuple[float, Group]] = []
    groups = synced(build(slow, fast)).generate(
        many(8),
        SAMPLING,
        num_generations=2,
        seed_key=KEY,
        on_group=lambda group: told.append((time.monotonic(), group)),
    )
    assert {id(group) for _, group in told} == {id(group) for group in groups}
    assert told[-1][0] - told[0][0] > 0.2, "they were told at the end"


def test_slow_server_gets_fewer_prompts(serve: Serve, build: Build) -> None:
    slow, fast = serve(max_num_seqs=2, seconds=0.3), serve(max_num_seqs=2, seconds=0.01)
    prompts = many(16)
    groups = generate(synced(build(slow, fast)), prompts, count=2)
    assert ids_of(groups) == expected_ids(prompts, fast.checksum, 2)
    shares = [server.paths().count("/v1/completions") for server in (slow, fast)]
    assert sum(shares) == 16
    assert shares[0] <= 4  # it has room for two at once


def test_no_more_requests_at_once_than_keep_a_server_busy(serve: Serve, build: Build) -> None:
    server = serve(max_num_seqs=8, seconds=0.05)
    generate(synced(build(server)), many(20), count=3)
    assert server.most_at_once == 4  # 9 completions are more than 8, and one prompt waits at the door


def test_greedy_completions_are_sampled_once(serve: Serve, build: Build) -> None:
    server = serve()
    engine = synced(build(server))
    greedy = Sampling(stop_ids=(257,), max_tokens=NUM_TOKENS, temperature=0.0)
    [group] = engine.generate(many(1), greedy, num_generations=3, seed_key=KEY)
    [body] = [body for path, body in server.calls if path == "/v1/completions"]
    assert (body["n"], body["temperature"]) == (1, 0.0)
    assert [one.index for one in group.completions] == [0, 1, 2]
    assert len({one.ids for one in group.completions}) == 1


def test_regular_expression_is_asked_for(serve: Serve, build: Build) -> None:
    server = serve()
    generate(synced(build(server)), many(1), sampling=replace(SAMPLING, regex="[a-z]+"))
    [body] = [body for path, body in server.calls if path == "/v1/completions"]
    assert body["structured_outputs"] == {"regex": "[a-z]+"}


@pytest.mark.parametrize(
    "fault", [DROP, 500, 503, lambda right: {"choices": right["choices"][1:]}], ids=["drop", "500", "503", "missing"]
)
def test_single_failure_is_asked_again(serve: Serve, build: Build, fault: Fault) -> None:
    server, notices = serve(), list[str]()
    engine = synced(build(server, on_notice=notices.append))
    server.faults["/v1/completions"].append(fault)
    prompts = many(3)
    assert ids_of(generate(engine, prompts)) == expected_ids(prompts, server.checksum, 3)
    assert server.paths().count("/v1/completions") == 4
    assert notices == []


@pytest.mark.parametrize("fault", [DROP, 500], ids=["drop", "500"])
def test_failed_server_is_left_out_until_the_next_weights(serve: Serve, build: Build, fault: Fault) -> None:
    broken, sound, notices = serve(seconds=0.05), serve(seconds=0.05), list[str]()
    engine = synced(build(broken, sound, on_notice=notices.append))
    broken.always["/v1/completions"] = fault
    prompts = many(10)
    assert ids_of(generate(engine, prompts)) == expected_ids(prompts, sound.checksum, 3)
    [notice] = notices
    assert notice.startswith(f"vLLM server {broken.url}: POST /v1/completions: ")
    assert notice.endswith("; it is left out until the next weights")

    asked = len(broken.calls)
    generate(engine, prompts)
    assert len(broken.calls) == asked

    broken.always.clear()
    synced(engine, version=2)
    assert notices[1:] == [f"vLLM server {broken.url}: it is back"]
    assert ids_of(generate(engine, prompts)) == expected_ids(prompts, sound.checksum, 3)
    assert len(broken.calls) > asked


def test_end_of_the_only_server_is_an_error_within_seconds(serve: Serve, build: Build) -> None:
    server = serve(seconds=0.2)
    engine = synced(build(server))
    threading.Timer(0.3, server.stop).start()
    begin = time.monotonic()
    with pytest.raises(ServerError) as caught:
        generate(engine, many(40))
    assert time.monotonic() - begin < 15
    assert server.url in caught.value.message
    assert caught.value.hint is not None
    with pytest.raises(ServerError, match=re.escape(server.url)):  # nothing is asked of it any more
        generate(engine, many(1))


def test_end_of_one_server_loses_nothing(serve: Serve, build: Build) -> None:
    dying, staying, notices = serve(seconds=0.1), serve(seconds=0.1), list[str]()
    engine = synced(build(dying, staying, on_notice=notices.append))
    threading.Timer(0.25, dying.stop).start()
    prompts = many(30)
    assert ids_of(generate(engine, prompts)) == expected_ids(prompts, staying.checksum, 3)
    assert len(notices) == 1
    report = engine.sync(weights(2), PolicyVersion(2))  # it is gone for good: one is enough
    assert (report.version, staying.version) == (2, 2)
    assert len(notices) == 1


def test_server_whose_engine_is_dead_is_left_out(serve: Serve, build: Build) -> None:
    """As vLLM does, it goes on to answer for itself."""
    dead, sound, notices = serve(), serve(), list[str]()
    engine = synced(build(dead, sound, on_notice=notices.append))
    dead.always.update(dict.fromkeys(["/health", "/pause", "/v1/completions"], 503))
    asked = len(dead.paths())
    prompts = many(4)
    assert ids_of(generate(engine, prompts)) == expected_ids(prompts, sound.checksum, 3)
    synced(engine, version=2)
    assert ids_of(generate(engine, prompts)) == expected_ids(prompts, sound.checksum, 3)
    assert len(dead.paths()) == asked
    assert len(notices) == 1
    assert "GET /health: 503" in notices[0]


def test_refused_request_ends_the_call_at_once(serve: Serve, build: Build) -> None:
    server, other = serve(), serve()
    engine = synced(build(server, other))
    server.always["/v1/completions"] = other.always["/v1/completions"] = 400
    with pytest.raises(TrainingError, match=r"POST /v1/completions: 400, told to answer 400$"):
        generate(engine, many(2))
    assert server.paths().count("/v1/completions") + other.paths().count("/v1/completions") <= 2


def test_weights_of_another_version_are_noticed_before_and_after(serve: Serve, build: Build) -> None:
    server = serve()
    engine = synced(build(server), version=5)
    server.version = 4
    with pytest.raises(TrainingError, match=r"version 4 .* instead of version 5 .* another run") as caught:
        generate(engine, many(1))
    assert not isinstance(caught.value, EngineLostError), "to take the server back would take it from the other"

    synced(engine, version=6)
    server.checksum = "0" * 32
    with pytest.raises(TrainingError, match="another run"):
        generate(engine, many(1))

    synced(engine, version=7)

    def other_weights_meanwhile(right: Any) -> Any:
        server.version = 8
        return right

    server.faults["/v1/completions"].append(other_weights_meanwhile)
    with pytest.raises(TrainingError, match="it serves weights of version 8") as caught:
        generate(engine, many(1))
    assert not isinstance(caught.value, EngineLostError)


def test_answers_of_a_server_that_was_restarted_meanwhile_are_asked_for_again(serve: Serve, build: Build) -> None:
    """It answers on, from weights that are none; nothing fails, or something does and it is found out in the middle."""
    for fails in (False, True):
        restarted, sound, notices = serve(seconds=0.02), serve(seconds=0.02), list[str]()
        engine = synced(build(restarted, sound, on_notice=notices.append))

        def restart(_: Any, server: ProtocolServer = restarted) -> Any:
            server.restart()
            return server.answer("/v1/completions", server.calls[-1][1])

        restarted.faults["/v1/completions"].extend([restart, *[lambda right: right] * 4, *[DROP] * fails])
        prompts = many(30)
        assert ids_of(generate(engine, prompts)) == expected_ids(prompts, sound.checksum, 3)
        assert restarted.paths().count("/v1/completions") > 4
        [notice] = notices
        assert notice.startswith(f"vLLM server {restarted.url}: it was restarted")


def test_restart_of_the_only_server_after_its_last_answer_is_a_loss(serve: Serve, build: Build) -> None:
    server = serve()
    engine = synced(build(server))

    def restart(right: Any) -> Any:
        server.restart()
        return right

    server.faults["/v1/completions"].append(restart)
    with pytest.raises(EngineLostError, match="it was restarted and has lost the weights"):
        generate(engine, many(1))


def test_prompt_that_takes_too_long_ends_the_call_and_is_no_loss(serve: Serve, build: Build) -> None:
    engine = synced(build(serve(seconds=3), serve(seconds=3), request_timeout=1.0))
    with pytest.raises(TrainingError, match=r"no answer within 1 s \(vllm.request_timeout\)") as caught:
        generate(engine, many(2))
    assert not isinstance(caught.value, EngineLostError)


def test_restarted_server_is_noticed_and_gets_the_weights_with_the_next_sync(serve: Serve, build: Build) -> None:
    server = serve()
    engine = synced(build(server), version=1)
    server.restart()
    with pytest.raises(ServerError, match="it was restarted and has lost the weights of version 1"):
        generate(engine, many(1))
    synced(engine, version=1)
    assert server.paths().count("/init_weight_transfer_engine") == 2
    assert server.paths().count("/start_weight_update") == 2  # nothing was tried in vain
    prompts = many(2)
    assert ids_of(generate(engine, prompts)) == expected_ids(prompts, server.checksum, 3)


def test_server_restarted_between_failure_and_repetition_is_not_asked_again(serve: Serve, build: Build) -> None:
    server = serve()
    engine = synced(build(server))

    def restart(_: Any) -> Any:
        server.restart()
        return b"broken"

    server.faults["/v1/completions"].append(restart)
    with pytest.raises(ServerError, match="it was restarted"):
        generate(engine, many(1))
    assert server.paths().count("/v1/completions") == 1


def test_paused_server_is_an_error_not_an_endless_wait(serve: Serve, build: Build) -> None:
    server = serve()
    engine = synced(build(server))
    server.paused = True
    with pytest.raises(TrainingError, match="it is paused: does another run use it") as caught:
        generate(engine, many(1))
    assert not isinstance(caught.value, EngineLostError)


def test_nothing_is_sampled_before_the_first_weights(serve: Serve, build: Build) -> None:
    with pytest.raises(ServerError, match="no vLLM server has the weights of this run"):
        generate(build(serve()), many(1))


def test_interrupted_generation_ends_at_once_and_drops_its_requests(serve: Serve, build: Build) -> None:
    server = serve(max_num_seqs=4)
    engine = synced(build(server, request_timeout=60.0))
    server.always["/v1/completions"] = HANG

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    begin = time.monotonic()
    try:
        with pytest.raises(Interrupted):
            generate(engine, many(6), count=2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begin < 8
    deadline = time.monotonic() + 5
    while len(server.left) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.left == ["/v1/completions"] * 3  # all that were in flight
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "vllm-requests"]
