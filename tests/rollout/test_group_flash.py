"""Sampling with the GPU's flash kernel, its operations by their definition (see `flash_operations`)."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dispatched import Dispatched
from flash_operations import FORWARD, flash_by_definition
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from grpo_cli import flash
from grpo_cli.rollout.local import LocalEngine
from grpo_cli.rollout.local.decoder import CacheDecoder, evaluating
from grpo_cli.rollout.local.group_cache import GroupCache
from grpo_cli.rollout.local.group_decoder import GroupDecoder, attending_by_groups
from grpo_cli.types import Group, Prompt, Sampling

Settings = Callable[..., Sampling]

ENDS = tuple(range(24))
"""Stop tokens that end completions of the tiny models after a few tokens, sooner or later."""


@pytest.fixture
def kernel() -> Iterator[None]:
    with flash_by_definition(in_any_type=True):
        yield


def sampled(groups: list[Group]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    return [(completion.ids, completion.logps) for group in groups for completion in group.completions]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "cohere", "qwen3_moe"])
def test_logits_are_those_of_the_models_own_cache(family: str, family_models: Any, prompts: list[Prompt]) -> None:
    model = family_models[family]
    ids = [prompt.ids for prompt in prompts]
    numbers = [1, 0, 1, 3, 0, 2, 1]
    tokens = torch.randint(256, (6, len(numbers)), generator=torch.Generator().manual_seed(0)).tolist()
    with evaluating(model):
        own = CacheDecoder(model, ids)
        expected = torch.stack([own.join(numbers), *(own.step(step) for step in tokens)])
        with attending_by_groups(model):
            decoder = GroupDecoder(model, ids, slots=8, max_tokens=9)
            found = [decoder.join(numbers)]
            with Dispatched() as seen:
                found += [decoder.step(step) for step in tokens]
    torch.testing.assert_close(torch.stack(found), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
    assert len(seen.named(FORWARD)) == 2 * len(tokens) * model.config.num_hidden_layers
    if family != "qwen3_moe":  # whose experts may be batched products
        assert not seen.named("bmm", "baddbmm")


@pytest.mark.parametrize("slots", [1, 3, 7, 64])
def test_rows_that_come_and_go_are_the_same_as_without_it(
    slots: int, model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_cli.rollout.local.group_layer._FIRST_CAPACITY", 2)
    sampling = settings(max_tokens=24, stop_ids=ENDS)

    def sample() -> list[tuple[tuple[int, ...], torch.Tensor]]:
        local = LocalEngine(model, tokenizer, max_num_seqs=slots)
        found = sampled(local.generate(prompts, sampling, num_generations=5, seed_key=(3,)))
        assert local.notices == []
        return found

    with flash_by_definition(in_any_type=True):
        with_it = sample()
    assert len({len(ids) for ids, _ in with_it}) >= 8
    for (ids, logps), (expected_ids, expected_logps) in zip(with_it, sample(), strict=True):
        assert ids == expected_ids
        torch.testing.assert_close(logps, expected_logps, atol=5e-5, rtol=0)


@pytest.mark.usefixtures("kernel")
def test_what_is_held_of_prompts_is_held_once(model: Any, prompts: list[Prompt]) -> None:
    ids = [prompt.ids for prompt in prompts]
    with evaluating(model), attending_by_groups(model):
        decoder = GroupDecoder(model, ids, slots=4, max_tokens=9)
        decoder.join([0, 1])
        decoder.step([5, 6])
        decoder.keep([1])
        decoder.join([2])
        decoder.step([7, 8])
        for layer in decoder.cache._layers.values():
            assert sorted(layer.prompts) == [1, 2]
            keys = {
                key.untyped_storage().data_ptr(): key.untyped_storage().nbytes() for key, _ in layer.prompts.values()
            }
            heads, _, size = layer.prompts[1][0].shape
            assert list(keys.values()) == [(len(ids[1]) + len(ids[2])) * heads * size * 4]


@pytest.mark.usefixtures("kernel")
def test_a_kernel_that_says_something_else_is_not_used(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = flash.Sequences.attend
    calls = 0

    def flawed(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        outcome, sums = attend(*arguments)
        return outcome, sums + torch.linspace(0, 1, sums.shape[-1])

    monkeypatch.setattr(flash.Sequences, "attend", flawed)
    local = LocalEngine(model, tokenizer, max_num_seqs=4)
    (notice,) = local.notices
    assert notice.startswith(
        "LlamaForCausalLM: completions are sampled without the flash kernel: its logits would differ"
    )
    tried = calls
    assert tried > 0
    local.generate(prompts, settings(max_tokens=4), num_generations=2, seed_key=(0,))
    assert calls == tried
    assert len(local.notices) == 1


class SeenAttention(TorchFunctionMode):
    """Notes how many heads of keys a prompt's attention is given, and whether query heads share them."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.calls.append((args[1].shape[1], kwargs["enable_gqa"]))
            return torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "dtype", "size", "heads"),
    [
        ("cpu", torch.float32, 8, 2),
        ("meta", torch.bfloat16, 8, 2),
        ("meta", torch.float32, 8, 4),
        ("meta", torch.bfloat16, 264, 4),
    ],
)
def test_heads_share_keys_where_a_kernel_can(device: str, dtype: torch.dtype, size: int, heads: int) -> None:
    """On a GPU (here a device without numbers) torch would hold all scores of a prompt where none can."""
    cache = GroupCache(slots=1, max_tokens=1, device=torch.device(device))
    cache.feed_prompts({0: 3})
    query, key, value = (torch.zeros(1, count, 3, size, device=device, dtype=dtype) for count in (4, 2, 2))
    module: Any = torch.nn.Module()
    module.layer_idx = 0
    with SeenAttention() as seen:
        cache.attend(module, query, key, value, 1.0)
    assert seen.calls == [(heads, heads == 2)]
