"""Which adapters vLLM is given as such."""

from collections.abc import Callable
from pathlib import Path

from transformers import AutoConfig

from grpo_cli.recipe.schema import LoraSection, VllmSection
from grpo_cli.rollout.vllm.arguments import lora_rank_to_send


def test_those_of_a_model_that_sees_are_merged_even_if_no_prompt_has_images(
    tiny_model_folder: Path, vision_folder: Callable[[str], Path]
) -> None:
    text, sees = (AutoConfig.from_pretrained(folder) for folder in (tiny_model_folder, vision_folder("qwen2_5_vl")))
    lora = LoraSection(r=4)
    assert lora_rank_to_send(VllmSection(), lora, config=text) == 4
    assert lora_rank_to_send(VllmSection(), lora, config=sees) is None
    for other in (LoraSection(use_dora=True), LoraSection(modules_to_save=["lm_head"]), None):
        assert lora_rank_to_send(VllmSection(), other, config=text) is None
    assert lora_rank_to_send(VllmSection(merge_adapters=True), lora, config=text) is None
