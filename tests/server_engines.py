"""What the tests of engines over servers share: prompts, weights, and the completions that are expected of them."""

from collections.abc import Callable, Sequence

import torch
from protocol_server import NUM_TOKENS, ProtocolServer, sampled_ids
from torch import Tensor

from grpo_cli.rollout.vllm.sampling import first_seed
from grpo_cli.rollout.vllm.server_engine import ServerEngine
from grpo_cli.types import Group, PolicyVersion, Prompt, PromptId, Sampling

KEY = (0, "train", 3)
SAMPLING = Sampling(stop_ids=(257,), max_tokens=NUM_TOKENS)
Build = Callable[..., ServerEngine]
Serve = Callable[..., ProtocolServer]


def weights(seed: int = 0) -> list[tuple[str, Tensor]]:
    """Some named tensors that take several buckets."""
    generator = torch.Generator().manual_seed(seed)
    return [(f"layer.{number}", torch.randn(8, 5, generator=generator)) for number in range(4)]


def synced(engine: ServerEngine, version: int = 1) -> ServerEngine:
    report = engine.sync(weights(version), PolicyVersion(version))
    assert report.version == version
    return engine


def many(count: int) -> list[Prompt]:
    return [
        Prompt(uid=PromptId(f"0:{number}"), ids=(65 + number, 66), text="", messages=None, row={})
        for number in range(count)
    ]


def expected_ids(prompts: Sequence[Prompt], checksum: str | None, count: int) -> list[list[list[int]]]:
    """Give the tokens of each prompt's completions: functions of weights, prompt and seed alone."""
    return [
        [sampled_ids(checksum, prompt.ids, first_seed(KEY, prompt.uid, n=count) + index) for index in range(count)]
        for prompt in prompts
    ]


def ids_of(groups: Sequence[Group]) -> list[list[list[int]]]:
    return [[list(one.ids) for one in group.completions] for group in groups]


def generate(
    engine: ServerEngine, prompts: Sequence[Prompt], count: int = 3, sampling: Sampling = SAMPLING
) -> list[Group]:
    return engine.generate(prompts, sampling, num_generations=count, seed_key=KEY)
