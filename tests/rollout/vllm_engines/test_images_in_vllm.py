"""vLLM in this process on prompts with images: what it makes of them is what the trainer makes of them, whatever was trained."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from optional_packages import needs_vllm
from vision_cases import VisionCase

from grpo_cli.errors import TrainingError
from grpo_cli.recipe.schema import VllmSection
from grpo_cli.rollout.sync.names import checkpoint_names
from grpo_cli.rollout.vllm.arguments import engine_arguments
from grpo_cli.rollout.vllm.colocate import ColocateEngine
from grpo_cli.types import Group, PolicyVersion

pytestmark = [pytest.mark.slow, needs_vllm]

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next", "smolvlm", "idefics3", "internvl")
"""All whose images vLLM computes on a CPU as transformers does: not Gemma 3, whose tokens of an image see each other both ways."""


@pytest.fixture(scope="module", params=FAMILIES)
def it(request: pytest.FixtureRequest, vision_folder: Callable[[str], Path]) -> VisionCase:
    """A family, whose weights the tests change."""
    return VisionCase(vision_folder(request.param))


@pytest.fixture(scope="module")
def engine(it: VisionCase) -> Iterator[ColocateEngine]:
    arguments = engine_arguments(
        VllmSection(),
        model=it.model.config._name_or_path,
        dtype="float32",
        max_model_len=256,
        seed=0,
        on_cpu=True,
        image_options={},
        sharing_memory=1,
    )
    engine = ColocateEngine(arguments, it.processor.tokenizer, bucket_bytes=1 << 18, dtype=None, max_num_seqs=16)
    yield engine
    engine.close()


def sampled(it: VisionCase, engine: ColocateEngine, version: int) -> list[Group]:
    engine.sync(checkpoint_names(it.model, list(it.model.named_parameters())), PolicyVersion(version))
    return engine.generate(it.prompts, it.sampling(), num_generations=3, seed_key=(version,))


def assert_true(it: VisionCase, groups: list[Group]) -> None:
    """The tolerance is that of the tests of text: both sum in float32, in another order."""
    for number, group in enumerate(groups):
        assert len(group.completions) == 3
        for completion in group.completions:
            torch.testing.assert_close(completion.logps, it.plain_logps(number, completion), atol=1e-4, rtol=0)


def test_logps_after_images_are_the_trainers_before_and_after_the_tower_was_trained(
    it: VisionCase, engine: ColocateEngine
) -> None:
    groups = sampled(it, engine, 1)
    assert_true(it, groups)
    it.move_tower(groups)
    assert_true(it, sampled(it, engine, 2))  # of the same images, which vLLM has encoded before


def test_a_prompt_of_which_vllm_makes_other_tokens_is_an_error(it: VisionCase, engine: ColocateEngine) -> None:
    sampled(it, engine, 3)
    prompt = replace(it.prompts[1], ids=it.prompts[1].ids[:-1])
    with pytest.raises(TrainingError, match=f"vLLM makes {len(prompt.ids) + 1} tokens of it"):
        engine.generate([prompt], it.sampling(), num_generations=1, seed_key=(0,))
    cut = replace(it.prompts[1], images=(b"no image",))
    with pytest.raises(TrainingError, match="vLLM does not take its images: an image cannot be read"):
        engine.generate([cut], it.sampling(), num_generations=1, seed_key=(0,))
    assert_true(it, sampled(it, engine, 4))  # nothing is left of them
