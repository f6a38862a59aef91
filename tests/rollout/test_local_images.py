"""The local engine on prompts with images, against what transformers makes of the processor's own output."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vision_models import VISION_FAMILIES
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from vision_cases import VisionCase

from grpo_cli.rollout.local import LocalEngine, group_check, prompt_images
from grpo_cli.rollout.local.decoder import evaluating
from grpo_cli.types import Group


@pytest.fixture(scope="session")
def case(vision_folder: Callable[[str], Path]) -> Callable[[str], VisionCase]:
    """Load a family once. Tests do not change its weights."""
    return cache(lambda family: VisionCase(vision_folder(family)))


def engine_of(it: VisionCase, **options: Any) -> LocalEngine:
    return LocalEngine(it.model, it.processor.tokenizer, **{"max_num_seqs": 16, "vision": it.vision, **options})


def tokens(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[completion.ids for completion in group.completions] for group in groups]


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_greedy_tokens_after_images_are_those_of_generate(
    family: str, share_prefix: bool, case: Callable[[str], VisionCase]
) -> None:
    it = case(family)
    engine = engine_of(it, share_prefix=share_prefix)
    assert not engine.notices  # nothing keeps it from feeding by groups
    groups = engine.generate(it.prompts, it.sampling(temperature=0.0), num_generations=2, seed_key=(0,))
    for inputs, group in zip(it.inputs, groups, strict=True):
        length = inputs["input_ids"].shape[1]
        output = it.model.generate(**inputs, do_sample=False, max_new_tokens=10, suppress_tokens=list(it.banned))
        expected = tuple(output[0, length:].tolist())
        assert [completion.ids for completion in group.completions] == [expected, expected]


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_logps_after_images_are_those_of_a_call_with_the_pixels(
    family: str, share_prefix: bool, case: Callable[[str], VisionCase]
) -> None:
    it = case(family)
    found = []
    for slots in (16, 3):
        engine = engine_of(it, share_prefix=share_prefix, max_num_seqs=slots)
        groups = engine.generate(it.prompts, it.sampling(), num_generations=3, seed_key=(1,))
        found.append(tokens(groups))
        for number, group in enumerate(groups):
            for completion in group.completions:
                expected = it.plain_logps(number, completion)
                torch.testing.assert_close(completion.logps, expected, atol=1e-5, rtol=1e-5)
    assert found[0] == found[1]  # whatever is sampled at once


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_an_image_is_encoded_once_for_its_group(
    family: str, share_prefix: bool, case: Callable[[str], VisionCase]
) -> None:
    it = case(family)
    sizes: list[int] = []

    def note(_module: nn.Module, _arguments: Any, output: Any) -> None:
        sizes.append(output.last_hidden_state.numel())

    tower = next(
        module for name, module in it.model.model.named_children() if name in ("visual", "vision_tower", "vision_model")
    )
    engine = engine_of(it, share_prefix=share_prefix, max_num_seqs=5 if share_prefix else 64)
    hook = tower.register_forward_hook(note)
    try:
        with torch.no_grad():
            for inputs in it.inputs[1:]:
                it.model(**inputs)
        once = sum(sizes)
        sizes.clear()
        engine.generate(it.prompts, it.sampling(max_tokens=4), num_generations=8, seed_key=(2,))
    finally:
        hook.remove()
    assert sum(sizes) == once


def test_banned_tokens_are_never_sampled(case: Callable[[str], VisionCase]) -> None:
    it = case("qwen2_5_vl")

    def sampled(banned: tuple[int, ...]) -> set[int]:
        groups = engine_of(it).generate(it.prompts, it.sampling(banned_ids=banned), num_generations=8, seed_key=(3,))
        return {token for group in groups for one in group.completions for token in one.ids}

    liked = sampled(it.banned) - {it.processor.tokenizer.eos_token_id}
    assert liked
    assert not sampled(tuple(sorted(liked))) & liked


def test_features_are_dropped_when_their_prompt_has_been_fed(case: Callable[[str], VisionCase]) -> None:
    it = case("llava_next")
    features: list[weakref.ref[Tensor]] = []

    def note(_module: nn.Module, _arguments: Any, output: Tensor) -> None:
        features.append(weakref.ref(output))

    alive: list[int] = []
    engine = engine_of(it, on_progress=lambda _: alive.append(sum(one() is not None for one in features)))
    hook = it.model.model.multi_modal_projector.register_forward_hook(note)
    try:
        engine.generate(it.prompts, it.sampling(), num_generations=2, seed_key=(4,))
    finally:
        hook.remove()
    assert features
    assert set(alive) == {0}


def test_images_are_encoded_anew_when_memory_runs_out(case: Callable[[str], VisionCase]) -> None:
    it = case("qwen2_vl")
    expected = engine_of(it).generate(it.prompts, it.sampling(), num_generations=3, seed_key=(5,))
    steps: list[int] = []

    def fail_once(added: int) -> None:
        steps.append(added)
        if len(steps) == 3:
            raise torch.OutOfMemoryError

    engine = engine_of(it, on_progress=fail_once)
    groups = engine.generate(it.prompts, it.sampling(), num_generations=3, seed_key=(5,))
    assert tokens(groups) == tokens(expected)
    assert any("out of memory" in notice for notice in engine.notices)


def test_a_window_that_is_too_short_leads_to_the_own_cache(
    vision_folder: Callable[[str], Path], case: Callable[[str], VisionCase]
) -> None:
    it = case("gemma3")
    narrow: Any = AutoModelForImageTextToText.from_pretrained(vision_folder("gemma3")).eval()
    engine = LocalEngine(narrow, it.processor.tokenizer, max_num_seqs=16, vision=it.vision)
    groups = engine.generate(it.prompts, it.sampling(temperature=0.0), num_generations=1, seed_key=(6,))
    assert any("some of its layers see" in notice for notice in engine.notices)
    for inputs, group in zip(it.inputs, groups, strict=True):
        length = inputs["input_ids"].shape[1]
        output = narrow.generate(**inputs, do_sample=False, max_new_tokens=10, suppress_tokens=list(it.banned))
        assert group.completions[0].ids == tuple(output[0, length:].tolist())


def test_the_check_at_the_start_shows_images_that_are_fed_wrongly(
    case: Callable[[str], VisionCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = case("gemma3")
    monkeypatch.setattr(prompt_images, "sees_images_both_ways", lambda _: False)
    with evaluating(it.model):
        assert group_check.obstacle(it.model) is None
        assert "its logits would differ" in str(group_check.obstacle(it.model, it.vision))


def test_the_positions_of_completions_go_on_behind_the_largest_of_the_image(case: Callable[[str], VisionCase]) -> None:
    it = case("qwen2_5_vl")
    seen: list[Mapping[str, Any]] = []
    hook = it.model.model.language_model.register_forward_pre_hook(
        lambda _module, _arguments, named: seen.append(named), with_kwargs=True
    )
    try:
        engine_of(it, share_prefix=False).generate(
            it.prompts[1:2], it.sampling(max_tokens=2), num_generations=1, seed_key=(7,)
        )
    finally:
        hook.remove()
    prompt, step = seen[-2]["position_ids"], seen[-1]["position_ids"]
    assert prompt.max() + 1 < prompt.shape[-1]  # an image takes fewer positions than tokens
    assert step.unique().tolist() == [int(prompt.max()) + 1]
