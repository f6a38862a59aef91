"""What a call of the local engine leaves behind and costs: modes, randomness, weights, versions, forwards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM

from grpo_cli.errors import ModelError
from grpo_cli.rollout.local import LocalEngine
from grpo_cli.types import Group, PolicyVersion, Prompt, Sampling

Settings = Callable[..., Sampling]


def ids_of(groups: list[Group]) -> list[list[tuple[int, ...]]]:
    return [[completion.ids for completion in group.completions] for group in groups]


def count_tokens_fed(model: Any) -> list[int]:
    """Tokens of each forward from now on."""
    fed: list[int] = []
    model.register_forward_pre_hook(
        lambda _module, _args, inputs: fed.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    return fed


def test_dropout_and_checkpointing_are_off_while_sampling_and_every_mode_comes_back(
    tmp_path: Path, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    folder = build_tiny_model(tmp_path, attention_dropout=0.5)
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = LocalEngine(model, tokenizer, max_num_seqs=4)
    model.eval()
    expected = ids_of(engine.generate(prompts, settings(), num_generations=2, seed_key=(0,)))
    model.train()
    model.model.layers[0].eval()
    model.gradient_checkpointing_enable()
    modes = [module.training for module in model.modules()]
    assert ids_of(engine.generate(prompts, settings(), num_generations=2, seed_key=(0,))) == expected
    assert [module.training for module in model.modules()] == modes
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("share_prefix", [True, False])
def test_groups_are_told_as_soon_as_they_are_complete(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings, share_prefix: bool
) -> None:
    """Prompts are sampled one after another here, so the first is told before the second has begun."""
    told: list[Group] = []
    seen: list[int] = []
    engine = LocalEngine(
        model, tokenizer, max_num_seqs=2, share_prefix=share_prefix, on_progress=lambda _: seen.append(len(told))
    )
    groups = engine.generate(prompts, settings(), num_generations=2, seed_key=(0,), on_group=told.append)
    assert sorted(told, key=lambda group: group.prompt.uid) == sorted(groups, key=lambda group: group.prompt.uid)
    assert sorted(set(seen)) == list(range(len(prompts) + 1))[: len(set(seen))]
    assert len(set(seen)) >= len(prompts)


def test_modes_come_back_after_an_error(model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("interrupted")

    model.train()
    engine = LocalEngine(model, tokenizer, max_num_seqs=4, on_progress=fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        engine.generate(prompts, settings(), num_generations=2, seed_key=(0,))
    assert model.training
    assert torch.is_grad_enabled()


def test_sampling_leaves_global_randomness_alone(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    before = torch.get_rng_state()
    LocalEngine(model, tokenizer, max_num_seqs=4).generate(prompts, settings(), num_generations=2, seed_key=(0,))
    assert torch.equal(torch.get_rng_state(), before)


def test_progress_counts_every_token_once(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    counts: list[int] = []
    engine = LocalEngine(model, tokenizer, max_num_seqs=64, on_progress=counts.append)
    groups = engine.generate(prompts, settings(stop_ids=tuple(range(4))), num_generations=10, seed_key=(0,))
    assert sum(counts) == sum(len(completion.ids) for group in groups for completion in group.completions)


def test_a_prompt_goes_through_the_model_once_and_the_last_token_not_at_all(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=4)
    fed = count_tokens_fed(model)
    (group,) = engine.generate(prompts[1:2], settings(max_tokens=5, min_tokens=5), num_generations=4, seed_key=(0,))
    assert [len(completion.ids) for completion in group.completions] == [5] * 4
    assert fed == [len(prompts[1].ids), 4, 4, 4, 4]


def test_finished_rows_leave_at_once(model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=16)
    fed = count_tokens_fed(model)
    (group,) = engine.generate(
        prompts[:1], settings(stop_ids=tuple(range(80)), max_tokens=30), num_generations=16, seed_key=(0,)
    )
    lengths = [len(completion.ids) for completion in group.completions]
    assert len(set(lengths)) >= 4
    assert fed[1:] == [sum(length > step for length in lengths) for step in range(1, max(lengths))]


def test_with_the_models_own_cache_at_most_one_finished_row_in_eight_stays(
    tmp_path: Path, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    folder = build_tiny_model(tmp_path, "mistral", sliding_window=4)
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = LocalEngine(model, tokenizer, max_num_seqs=16)
    fed = count_tokens_fed(model)
    (group,) = engine.generate(
        prompts[:1], settings(stop_ids=tuple(range(80)), max_tokens=30), num_generations=16, seed_key=(0,)
    )
    lengths = [len(completion.ids) for completion in group.completions]
    assert len(set(lengths)) >= 4
    going = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    one_to_see_the_cache = 1
    assert fed[:2] == [one_to_see_the_cache, len(prompts[0].ids)]
    assert len(fed) == 2 + len(going)
    assert all(count <= rows <= count / 0.875 for rows, count in zip(fed[2:], going, strict=True))


def test_no_prompts_give_no_groups(model: Any, tokenizer: Any, settings: Settings) -> None:
    assert LocalEngine(model, tokenizer, max_num_seqs=4).generate([], settings(), num_generations=2, seed_key=()) == []


def test_completions_carry_the_version_of_the_last_sync(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=4)
    engine.sync(model.named_parameters(), PolicyVersion(5))
    (group,) = engine.generate(prompts[:1], settings(), num_generations=1, seed_key=(0,))
    assert group.completions[0].policy_version == 5
    engine.close()


def test_weights_are_shared_with_the_trainer(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=4)
    before = ids_of(engine.generate(prompts, settings(), num_generations=1, seed_key=(0,)))
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(torch.randn(260, 32, generator=torch.Generator().manual_seed(0)))
    assert ids_of(engine.generate(prompts, settings(), num_generations=1, seed_key=(0,))) != before


def test_a_model_without_a_cache_is_refused_by_name(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    model.config.sliding_window = 4  # without one it would need no cache
    forward = type(model).forward

    class Cacheless(type(model)):  # type: ignore[misc]
        def forward(self, **inputs: Any) -> Any:
            return forward(self, **{**inputs, "use_cache": False})

    model.__class__ = Cacheless
    with pytest.raises(ModelError, match="Cacheless: it returns no key-value cache"):
        LocalEngine(model, tokenizer, max_num_seqs=4).generate(prompts, settings(), num_generations=1, seed_key=(0,))
