"""Prompts with images over several servers: each goes out once for its group, and again when its server fails."""

import base64
from dataclasses import replace
from typing import Any

import pytest
from protocol_server import DROP, ProtocolServer
from server_engines import Build, Serve, expected_ids, generate, ids_of, many, synced

from grpo_cli.errors import ModelError, TrainingError
from grpo_cli.rollout.vllm.client import ServerError
from grpo_cli.rollout.vllm.fit import Needs
from grpo_cli.types import Prompt

TEXT, IMAGES = "/v1/completions", "/grpo/completions"


def mixed(count: int) -> list[Prompt]:
    """Every second one has two images, whose places take three tokens each."""
    return [
        prompt
        if number % 2 == 0
        else replace(prompt, ids=(65, *[66] * 6), text="ABB", images=(f"{number}".encode(), b"second"))
        for number, prompt in enumerate(many(count))
    ]


def asked(*servers: ProtocolServer) -> list[dict[str, Any]]:
    return [body for server in servers for path, body in server.calls if path == IMAGES]


def test_each_prompt_with_images_is_one_request_for_its_whole_group(serve: Serve, build: Build, tokenizer: Any) -> None:
    servers = [serve(max_num_seqs=3, seconds=0.01) for _ in range(2)]
    prompts = mixed(12)
    groups = generate(synced(build(*servers)), prompts)
    assert ids_of(groups) == expected_ids(prompts, servers[0].checksum, 3)
    assert sum(server.paths().count(TEXT) for server in servers) == 6
    found = {body["uid"]: body for body in asked(*servers)}
    assert len(found) == len(asked(*servers)) == 6
    assert all({TEXT, IMAGES} & set(server.paths()) for server in servers)
    for prompt in prompts[1::2]:
        body = found[prompt.uid]
        assert [base64.b64decode(image) for image in body["images"]] == list(prompt.images)
        assert (body["prompt"], body["unexpanded"], body["n"]) == (list(prompt.ids), tokenizer("ABB")["input_ids"], 3)


def test_a_failure_is_asked_again_with_the_same_images(serve: Serve, build: Build) -> None:
    server = serve()
    engine = synced(build(server))

    def cut_short(right: Any) -> Any:
        """As when vLLM has lost an image between its processes."""
        return {"choices": [{**one, "finish_reason": "error"} for one in right["choices"]]}

    server.faults[IMAGES].extend([DROP, cut_short])
    (prompt,) = mixed(2)[1:]
    assert ids_of(generate(engine, [prompt])) == expected_ids([prompt], server.checksum, 3)
    first, *others = asked(server)
    assert others == [first, first]


def test_a_failed_server_leaves_its_images_to_the_others(serve: Serve, build: Build) -> None:
    broken, sound, notices = serve(seconds=0.05), serve(seconds=0.05), list[str]()
    engine = synced(build(broken, sound, on_notice=notices.append))
    broken.always[IMAGES] = 500
    prompts = mixed(20)[1::2]
    assert ids_of(generate(engine, prompts)) == expected_ids(prompts, sound.checksum, 3)
    [notice] = notices
    assert notice.startswith(f"vLLM server {broken.url}: POST {IMAGES}: 500")


def test_images_that_a_server_does_not_take_in_one_request_end_the_call(serve: Serve, build: Build) -> None:
    server = serve(max_body_bytes=2000)
    engine = synced(build(server))
    prompt = replace(mixed(2)[1], images=(b"x" * 1500,))
    with pytest.raises(
        TrainingError, match=r"prompt 0:1 with its images takes 2,\d\d\d bytes; allowed: 2,000"
    ) as caught:
        generate(engine, [prompt])
    assert not isinstance(caught.value, ServerError)
    assert "--max-body-mib" in str(caught.value.hint)
    assert asked(server) == []


def test_a_server_that_takes_no_images_is_refused_where_prompts_have_some(serve: Serve, build: Build) -> None:
    blind = serve(max_images=0)
    build(blind).wait_until_ready(5)
    with pytest.raises(
        ModelError, match=f"{blind.url}: it takes no images, but prompts of this run have some"
    ) as caught:
        build(blind, needs=Needs(model="seeing", image_options={})).wait_until_ready(5)
    assert "start it with a model that sees, as seeing does: `grpo vllm-serve RECIPE`" in str(caught.value.hint)


def test_a_server_that_takes_fewer_images_of_a_prompt_is_refused_with_the_option_that_changes_it(
    serve: Serve, build: Build
) -> None:
    server = serve(max_images=2)
    build(server, needs=Needs(image_options={}, most_images=2)).wait_until_ready(5)
    with pytest.raises(
        ModelError, match=rf"{server.url}: it takes 2 image\(s\) of a prompt, but prompts of this run have up to 3"
    ) as caught:
        build(server, needs=Needs(image_options={}, most_images=3)).wait_until_ready(5)
    assert 'start the server with `--engine "limit_mm_per_prompt={image: 3}"`' in (caught.value.hint or "")


def test_a_server_that_prepares_images_in_another_way_is_refused_where_prompts_have_some(
    serve: Serve, build: Build
) -> None:
    server = serve(max_images=999, image_options={"max_pixels": 784})
    build(server, needs=Needs(image_options={"max_pixels": 784})).wait_until_ready(5)
    build(server, needs=Needs(image_options=None)).wait_until_ready(5)
    with pytest.raises(
        ModelError,
        match=r'it prepares images with the options {"max_pixels": 784}, but this run with {} \(model.processor_kwargs\)',
    ):
        build(server, needs=Needs(image_options={})).wait_until_ready(5)
