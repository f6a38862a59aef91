"""Memory that runs out while sampling."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_cli.rollout.local import LocalEngine
from grpo_cli.types import Group, Prompt, Sampling

Settings = Callable[..., Sampling]
ENDS = tuple(range(24))


def limit_rows(model: Any, most: int) -> list[int]:
    """Let a forward of more rows than this run out of memory; returns the rows of all forwards of single tokens."""
    fed: list[int] = []

    def check(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        rows, width = inputs["input_ids"].shape
        if width == 1:
            fed.append(rows)
        if rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.register_forward_pre_hook(check, with_kwargs=True)
    return fed


def completions_of(groups: list[Group]) -> list[tuple[int, tuple[int, ...], str]]:
    return [(one.index, one.ids, one.finish_reason) for group in groups for one in group.completions]


@pytest.mark.parametrize("sliding_window", [None, 4], ids=["groups", "own cache"])
def test_fewer_rows_are_sampled_at_once_and_the_completions_are_the_same(
    sliding_window: int | None, model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    model.config.sliding_window = sliding_window  # a Llama does not look at it, the engine does
    sampling = settings(max_tokens=24, stop_ids=ENDS)
    plain = LocalEngine(model, tokenizer, max_num_seqs=64)
    expected = completions_of(plain.generate(prompts, sampling, num_generations=4, seed_key=(0,)))
    counts: list[int] = []
    engine = LocalEngine(model, tokenizer, max_num_seqs=64, on_progress=counts.append)
    fed = limit_rows(model, 6)
    assert completions_of(engine.generate(prompts, sampling, num_generations=4, seed_key=(0,))) == expected
    assert sum(counts) == sum(len(ids) for _, ids, _ in expected)
    assert engine.notices[-2:] == [
        f"out of memory while sampling: from here on {rows} completions are sampled at once at most (generation.max_num_seqs)"
        for rows in (10, 5)
    ]
    assert max(fed[2:]) <= 10
    fed.clear()
    engine.generate(prompts, sampling, num_generations=4, seed_key=(0,))
    assert max(fed) == 5  # what was learnt is kept


def test_one_row_that_does_not_fit_is_an_error(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=4)
    limit_rows(model, 0)
    model.train()
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(prompts, settings(), num_generations=2, seed_key=(0,))
    assert model.training


def test_other_errors_are_not_taken_for_it(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("device-side assert triggered")

    engine = LocalEngine(model, tokenizer, max_num_seqs=4, on_progress=fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        engine.generate(prompts, settings(), num_generations=2, seed_key=(0,))
    assert engine.notices == []
