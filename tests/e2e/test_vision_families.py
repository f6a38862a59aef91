"""The whole line with images, for every family: rows with one image, two and none, sampled by the built-in engine and trained on.

What is sampled is compared with the model's own call on what its processor makes of the row: none of that passes through the code
under test. A run that is stopped between two steps of one generation, so that images lie in its checkpoint, goes on bit for bit.
"""

import io
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from e2e.experiment import assert_same_run, records, weights
from PIL import Image
from safetensors.torch import load_file
from tiny_vision_models import VISION_FAMILIES
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForImageTextToText, AutoProcessor
from vision_prompts import PICTURES, conversation

from grpo_cli.engine.run import run
from grpo_cli.engine.trainer import Trainer
from grpo_cli.errors import Interrupted
from grpo_cli.policy.parts import parameters_of
from grpo_cli.recipe.load import load_recipe
from grpo_cli.telemetry.completions import CompletionFiles
from grpo_cli.telemetry.records import Rollouts
from grpo_cli.types import ScoredGroup
from grpo_cli.vision.inputs import placeholder_ids

ROWS = ((0,), (1, 2), (), (3,), (), (2, 0))
"""Which pictures each row has."""

STEPS, IN_ONE_GENERATION = 3, 2

FROZEN = {"smolvlm": "vision_tower"}
"""Part that is not trained, by family."""

REWARDS = '''
def letters(completions, images, **_):
    """Depends on what was said and on what was to be seen."""
    assert all(image.mode == "RGB" for shown in images for image in shown or ())
    return [
        sum(map(ord, completion[0]["content"])) % 17 + sum(image.width for image in shown or ()) / 100
        for completion, shown in zip(completions, images, strict=True)
    ]
'''


def write_experiment(folder: Path, model: Path, *, frozen: str | None) -> Path:
    """Write rows, pictures, rewards and a recipe that leaves a part as it is, if one is named; give the recipe."""
    for number, image in enumerate(PICTURES):
        (folder / f"{number}.png").write_bytes(image)
    rows = [
        {"prompt": [{"role": "user", "content": f"Row {number}?"}], "images": [f"{shown}.png" for shown in images]}
        for number, images in enumerate(ROWS)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARDS)
    recipe = {
        "model": {"name_or_path": str(model), "freeze": [] if frozen is None else [frozen]},
        "dataset": {"name": "data.jsonl"},
        "rewards": {"reward_funcs": ["my_rewards.letters"]},
        "grpo": {"num_generations": 3, "steps_per_generation": IN_ONE_GENERATION, "beta": 0.0},
        "generation": {"max_completion_length": 5},
        "train": {"prompts_per_step": 2, "max_steps": STEPS, "learning_rate": 0.01, "save_steps": 0},
        "logging": {"print_completions_steps": 0},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def train(recipe: Path, output: str, *, stop_after: int | None = None, resume: str | None = None) -> list[ScoredGroup]:
    """Train, up to a signal after a step if there is to be one; give all that was sampled."""
    sampled: list[ScoredGroup] = []
    step, write = Trainer._train_step, CompletionFiles.write_training

    def train_step(self: Trainer) -> None:
        step(self)
        if self.state.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def write_training(self: CompletionFiles, number: int, rollouts: Rollouts) -> None:
        sampled.extend(rollouts.scored)
        write(self, number, rollouts)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "_train_step", train_step)
        patched.setattr(CompletionFiles, "write_training", write_training)
        run(load_recipe(recipe, [f"train.output_dir={recipe.parent / output}"]), resume=resume)
    return sampled


def plain_logps(model: Any, processor: Any, row: int, completion: Sequence[int]) -> Tensor:
    """Call the model on a row as its processor prepares it, followed by a completion; give the log-probability of each of its tokens."""
    shown = [{"type": "image", "image": Image.open(io.BytesIO(PICTURES[number]))} for number in ROWS[row]]
    inputs = dict(
        processor.apply_chat_template(
            [{"role": "user", "content": [*shown, {"type": "text", "text": f"Row {row}?"}]}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    )
    ids = inputs.pop("input_ids")
    del inputs["attention_mask"]
    for name in {"token_type_ids", "mm_token_type_ids"} & inputs.keys():
        inputs[name] = pad(inputs[name], (0, len(completion)))
    with torch.no_grad():
        logits = model(input_ids=torch.cat([ids, torch.tensor([completion])], dim=1), **inputs).logits[
            0, ids.shape[1] - 1 : -1
        ]
    logits[:, list(placeholder_ids(model.config))] = -torch.inf
    found: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
    return found


def assert_same_processor(folder: Path, processor: Any) -> None:
    """Open a folder as transformers' users do, and compare what it makes of a conversation with images."""
    opened = AutoProcessor.from_pretrained(folder)
    assert opened.chat_template == processor.chat_template
    inputs = [
        one.apply_chat_template(
            conversation([{"image": Image.open(io.BytesIO(image))} for image in PICTURES]),
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        for one in (opened, processor)
    ]
    assert inputs[0].keys() == inputs[1].keys()
    assert all(torch.equal(tensor, inputs[1][name]) for name, tensor in inputs[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_family_is_sampled_trained_and_resumed_with_images(
    family: str, vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe = write_experiment(tmp_path, vision_folder(family), frozen=FROZEN.get(family))
    sampled = train(recipe, "whole")

    model = AutoModelForImageTextToText.from_pretrained(vision_folder(family)).eval()
    processor = AutoProcessor.from_pretrained(vision_folder(family))
    first = sampled[: 2 * IN_ONE_GENERATION]
    for scored in first:
        prompt = scored.group.prompt
        row = int(prompt.row["prompt"][0]["content"][4])
        assert len(prompt.images) == len(ROWS[row])
        for completion in scored.group.completions:
            assert set(completion.ids).isdisjoint(placeholder_ids(model.config))
            expected = plain_logps(model, processor, row, completion.ids)
            torch.testing.assert_close(completion.logps, expected, rtol=1e-3, atol=1e-4)
    assert {len(scored.group.prompt.images) for scored in sampled} == {0, 1, 2}

    for record in records(tmp_path / "whole"):
        assert record["grad_norm"] > 0
        assert record["sampling/logp_difference/max"] < 1e-3
    shown = [
        row.get("images")
        for file in (tmp_path / "whole/completions").glob("*.parquet")
        for row in pq.read_table(file).to_pylist()
    ]
    assert sorted(len(images or ()) for images in shown) == sorted(
        len(scored.group.prompt.images) for scored in sampled for _ in range(3)
    )
    before, after = load_file(vision_folder(family) / "model.safetensors"), weights(tmp_path / "whole")
    assert before.keys() == after.keys()
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole" / "final")
    for part in ("vision_tower", "projector", "language_model"):
        kept = [torch.equal(model.get_parameter(name), one) for name, one in parameters_of(trained, part).items()]
        assert all(kept) if part == FROZEN.get(family) else not all(kept)
    assert_same_processor(tmp_path / "whole" / "final", processor)

    with pytest.raises(Interrupted):
        train(recipe, "stopped", stop_after=1)
    train(recipe, "stopped", resume="newest")
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
