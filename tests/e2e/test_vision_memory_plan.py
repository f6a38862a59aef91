"""What `grpo plan` says of memory where images go through a vision tower, against the peaks of real runs on a CPU."""

import json

import pytest
from e2e.experiment import Experiment, make_experiment
from e2e.test_memory_plan import WITHIN, measured, planned
from tiny_vision_models import build_tiny_vision_model
from transformers import AutoProcessor
from vision_prompts import picture
from warm_start import WarmStart

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SIDE = 112
"""Pixels: 784 patches, of which four become a token."""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """Of a model whose tower takes most of it, and of pictures that are most of a prompt."""
    folder = tmp_path_factory.mktemp("experiment")
    blocks = 6
    tower = {"depth": blocks, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "initializer_range": 0.02}
    model = build_tiny_vision_model(
        folder / "model", "qwen2_5_vl", tower={**tower, "fullatt_block_indexes": list(range(blocks))}
    )
    build_tiny_vision_model(folder / "small", "qwen2_5_vl")
    pixels = {"shortest_edge": 8 * 8, "longest_edge": SIDE * SIDE}
    AutoProcessor.from_pretrained(model, size=pixels).save_pretrained(model)
    made = make_experiment(
        folder,
        model,
        rewards={"reward_funcs": ["my_rewards.few_letters"]},
        generation={"max_completion_length": 8, "min_completion_length": 8},
        train={"max_steps": 2, "learning_rate": 1e-6, "micro_batch_tokens": 1024},
        dataset={"max_prompt_length": 224},
    )
    (folder / "my_rewards.py").write_text(
        "def few_letters(completions, **_):\n    return [float(len(one[0]['content'])) for one in completions]\n"
    )
    rows = []
    for number in range(4):
        (folder / f"{number}.png").write_bytes(picture(number, SIDE, SIDE))
        rows.append({"prompt": [{"role": "user", "content": "See?"}], "images": [f"{number}.png"]})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.mark.parametrize("checkpointing", [False, "selective"])
def test_images_need_what_is_planned(warm: WarmStart, experiment: Experiment, checkpointing: bool | str) -> None:
    changes = {"train.gradient_checkpointing": checkpointing}
    memory = planned(experiment, 1, changes).memory
    assert memory.total == memory.training
    assert memory.images > 0.3 * memory.total, "most of the rest are weights and the optimizer's states"
    for needed in measured(warm, experiment, 1, changes):
        assert needed == pytest.approx(memory.total, rel=WITHIN), memory


def test_where_no_length_is_given_a_prompt_is_looked_at(experiment: Experiment) -> None:
    """Of prompts with images not all are prepared beforehand; these have 784 / 4 tokens of an image, and some words."""
    plan = planned(experiment, 1, {"dataset.max_prompt_length": "null"})
    assert 196 < plan.longest_prompt < 224
    assert plan.memory.images > 0
