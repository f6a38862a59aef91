"""How much the local engine holds at once: rows under a token budget, prompts only as long as they are needed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_cli.rollout.local import LocalEngine
from grpo_cli.rollout.local.group_decoder import GroupDecoder
from grpo_cli.types import Group, Prompt, Sampling

Settings = Callable[..., Sampling]


def ids_of(groups: list[Group]) -> list[tuple[int, ...]]:
    return [one.ids for group in groups for one in group.completions]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """At every step of the group decoder: the tokens that its rows and their prompts may come to, and the prompts it holds needlessly."""
    seen: list[tuple[int, int]] = []
    step = GroupDecoder.step

    def watched(self: GroupDecoder, tokens: Any) -> torch.Tensor:
        cache = self.cache
        prompts = sum(len(self._prompts[number]) for number in set(cache.numbers))
        held = next(iter(cache._layers.values())).prompts
        seen.append((prompts + len(cache.numbers) * cache._max_tokens, len(held) - len(set(cache.numbers))))
        return step(self, tokens)

    monkeypatch.setattr(GroupDecoder, "step", watched)
    return seen


@pytest.mark.parametrize("budget", [1, 40, 100, 1000])
def test_rows_join_as_far_as_the_token_budget_allows(
    budget: int, model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings, steps: list[tuple[int, int]]
) -> None:
    sampling = settings(stop_ids=tuple(range(24)))
    expected = ids_of(
        LocalEngine(model, tokenizer, max_num_seqs=64).generate(prompts, sampling, num_generations=3, seed_key=(0,))
    )
    unlimited = max(tokens for tokens, _ in steps)
    steps.clear()
    engine = LocalEngine(model, tokenizer, max_num_seqs=64, max_cached_tokens=budget)
    assert ids_of(engine.generate(prompts, sampling, num_generations=3, seed_key=(0,))) == expected
    one_row = max(len(prompt.ids) for prompt in prompts) + sampling.max_tokens
    assert max(tokens for tokens, _ in steps) <= max(budget, one_row)
    assert (max(tokens for tokens, _ in steps) == unlimited) == (budget >= unlimited)


@pytest.mark.parametrize("slots", [1, 2, 7, 64])
def test_a_prompt_is_fed_once_and_forgotten_when_its_rows_have_left(
    slots: int,
    model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    settings: Settings,
    steps: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fed: list[int] = []
    feed = GroupDecoder._feed_prompts

    def watched(self: GroupDecoder, numbers: Any) -> None:
        fed.extend(numbers)
        feed(self, numbers)

    engine = LocalEngine(model, tokenizer, max_num_seqs=slots)
    steps.clear()
    monkeypatch.setattr(GroupDecoder, "_feed_prompts", watched)
    engine.generate(prompts, settings(stop_ids=tuple(range(24))), num_generations=3, seed_key=(0,))
    assert sorted(fed) == list(range(len(prompts)))
    assert max(idle for _, idle in steps) <= 1  # the newest, of which more rows might be waiting


def test_one_straggler_that_runs_out_of_memory_halves_the_rows_of_its_attempt(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails with one row left of twenty says nothing against ten rows at once."""
    failed: list[bool] = []
    step = GroupDecoder.step

    def failing(self: GroupDecoder, tokens: Any) -> torch.Tensor:
        if len(tokens) == 1 and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, tokens)

    sampling = settings(max_tokens=24, stop_ids=tuple(range(24)))
    expected = ids_of(
        LocalEngine(model, tokenizer, max_num_seqs=20).generate(prompts, sampling, num_generations=4, seed_key=(0,))
    )
    monkeypatch.setattr(GroupDecoder, "step", failing)
    engine = LocalEngine(model, tokenizer, max_num_seqs=20)
    assert ids_of(engine.generate(prompts, sampling, num_generations=4, seed_key=(0,))) == expected
    assert failed
    assert engine._max_num_seqs == 10
