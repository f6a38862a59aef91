"""Every vision-language family and every way of computing, against the model's own call on each sequence by itself."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from padded_calls import SAMPLING, Attention, assert_same_gradients, backward, gradients
from PIL import Image
from tiny_vision_models import VISION_FAMILIES
from torch import nn
from transformers import AutoProcessor
from vision_prompts import PICTURES

from grpo_cli.policy.agreement import choose_forward
from grpo_cli.policy.checkpointing import Checkpointing, set_checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.images import SegmentImages
from grpo_cli.policy.layout import packed_row
from grpo_cli.policy.load import load_model
from grpo_cli.policy.load_vision import load_vision
from grpo_cli.policy.parts import parameters_of
from grpo_cli.policy.split_prompt import SplitPrompt
from grpo_cli.recipe.schema import LoraSection, ModelSection
from grpo_cli.types import Segment, TokenStats

COMPLETIONS = ((20, 21, 22, 23), (24,), (25, 26, 27, 28, 29, 30, 31), (35, 36))
ONE, TWO, NONE = (
    [
        {
            "role": "user",
            "content": [
                *({"type": "image"} for _ in range(count)),
                {"type": "text", "text": "Which digits are these?"},
            ],
        }
    ]
    for count in (1, 2, 0)
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A segment, and what the processor itself says about its prompt."""

    segment: Segment
    inputs: Any


def question(folder: Path, turns: Sequence[Any], images: tuple[bytes, ...], pictures: Sequence[Any]) -> Question:
    """Ask the processor, as transformers' users do."""
    processor = AutoProcessor.from_pretrained(folder)
    content = iter(pictures)
    filled = [
        turn
        | {
            "content": [
                part | ({"image": next(content)} if part["type"] == "image" else {}) for part in turn["content"]
            ]
        }
        for turn in turns
    ]
    inputs = processor.apply_chat_template(
        filled, tokenize=True, return_dict=True, add_generation_prompt=True, processor_kwargs={"return_tensors": "pt"}
    )
    ids = tuple(inputs["input_ids"][0].tolist())
    return Question(segment=Segment(prompt_ids=ids, completion_ids=COMPLETIONS, images=images), inputs=inputs)


def own_call(model: Any, questions: Sequence[Question]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the completions, a call for each."""
    logps, entropies = [], []
    for asked in questions:
        for ids in asked.segment.completion_ids:
            inputs = {name: tensor for name, tensor in asked.inputs.items() if name != "attention_mask"}
            for name in inputs.keys() & {"token_type_ids", "mm_token_type_ids"}:
                inputs[name] = torch.cat([inputs[name], torch.zeros(1, len(ids) - 1, dtype=torch.long)], dim=1)
            inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([ids[:-1]], dtype=torch.long)], dim=1)
            distribution = model(**inputs, use_cache=False).logits[0, -len(ids) :].log_softmax(-1)
            logps.append(distribution[torch.arange(len(ids)), torch.tensor(ids)])
            entropies.append(torch.special.entr(distribution.exp()).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


def asked(folder: Path) -> list[Question]:
    """Give one image, none, and two, one of them as before."""
    opened = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in PICTURES[:2]]
    return [
        question(folder, ONE, PICTURES[:1], opened[:1]),
        question(folder, NONE, (), ()),
        question(folder, TWO, PICTURES[:2], opened[:2]),
    ]


def padded(policy: PolicyModel, segments: Sequence[Segment], weights: torch.Tensor) -> list[TokenStats]:
    stats = policy(tuple(segments))
    backward(stats.logps, weights)
    return [stats]


def packed(policy: PolicyModel, segments: Sequence[Segment], weights: torch.Tensor) -> list[TokenStats]:
    policy.share_prefix()
    return padded(policy, segments, weights)


def in_parts(policy: PolicyModel, segments: Sequence[Segment], weights: torch.Tensor) -> list[TokenStats]:
    policy.share_prefix()
    found = []
    for segment in segments:
        prompt = SplitPrompt(segment.prompt_ids)
        for completions in (segment.completion_ids[:1], segment.completion_ids[1:2], segment.completion_ids[2:]):
            found.append(policy((replace(segment, completion_ids=completions),), prompt=prompt))
            share, weights = weights[: len(found[-1].logps)], weights[len(found[-1].logps) :]
            backward(found[-1].logps, share)
        loss = prompt.loss()
        assert loss is not None
        torch.autograd.backward(loss)
    return found


Way = Callable[[PolicyModel, Sequence[Segment], torch.Tensor], list[TokenStats]]


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize(
    ("way", "attention", "checkpointing", "adapted"),
    [
        (padded, "sdpa", False, False),
        (packed, "sdpa", False, False),
        (packed, "eager", True, False),
        (packed, "sdpa", "selective", True),
        (in_parts, "sdpa", "selective", False),
        (in_parts, "eager", False, True),
    ],
)
def test_statistics_and_gradients_are_those_of_the_models_own_calls(
    family: str,
    *,
    way: Way,
    attention: Attention,
    checkpointing: Checkpointing,
    adapted: bool,
    vision_folder: Callable[[str], Path],
) -> None:
    folder = vision_folder(family)
    section = ModelSection(
        name_or_path=str(folder), attn_implementation=attention, lora=LoraSection(r=4) if adapted else None
    )
    model = load_model(section, folder=folder)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # 0 at first, so that nothing would be seen of the adapters
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    questions = asked(folder)
    expected_logps, expected_entropies = own_call(model, questions)
    weights = torch.linspace(-1, 1, len(expected_logps))
    backward(expected_logps, weights)
    expected = gradients(model)
    model.zero_grad()

    policy = PolicyModel(model, sampling=SAMPLING, vision=load_vision(section, folder=folder))
    set_checkpointing(model, checkpointing)
    stats = way(policy, [one.segment for one in questions], weights)
    logps, entropies = (torch.cat([getattr(one, name).detach() for one in stats]) for name in ("logps", "entropies"))
    torch.testing.assert_close(logps, expected_logps.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropies, expected_entropies.detach(), rtol=1e-4, atol=1e-4)
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_start_up_check_lets_images_be_shared(family: str, *, vision_folder: Callable[[str], Path]) -> None:
    folder = vision_folder(family)
    section = ModelSection(name_or_path=str(folder))
    policy = PolicyModel(
        load_model(section, folder=folder), sampling=SAMPLING, vision=load_vision(section, folder=folder)
    )
    segments = tuple(one.segment for one in asked(folder))
    assert choose_forward(policy, segments) == []
    assert policy.shares_prefix
    assert policy.splits_prompts


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_an_image_is_encoded_once_for_its_group(family: str, *, vision_folder: Callable[[str], Path]) -> None:
    folder = vision_folder(family)
    section = ModelSection(name_or_path=str(folder))
    model = load_model(section, folder=folder)
    policy = PolicyModel(model, sampling=SAMPLING, vision=load_vision(section, folder=folder))
    segments = (asked(folder)[0].segment,)
    fed: list[int] = []
    tower = next(
        module for name, module in model.named_modules() if name.endswith(("vision_tower", "visual", "vision_model"))
    )
    tower.register_forward_hook(lambda _module, _inputs, output: fed.append(output.last_hidden_state.numel()))
    policy(segments)
    policy.share_prefix()
    policy(segments)
    assert fed[0] == len(COMPLETIONS) * fed[1]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_seeing_nothing_changes_nothing_but_goes_through_the_weights(
    family: str, *, vision_folder: Callable[[str], Path]
) -> None:
    """Processes that hold parts of the weights would wait for each other for ever if one of them left the vision tower out."""
    folder = vision_folder(family)
    section = ModelSection(name_or_path=str(folder))
    model = load_model(section, folder=folder)
    policy = PolicyModel(model, sampling=SAMPLING, vision=load_vision(section, folder=folder))
    policy.share_prefix()
    segments = (Segment(prompt_ids=(5, 6, 7), completion_ids=COMPLETIONS),)
    weights = torch.linspace(-1, 1, sum(map(len, COMPLETIONS)))
    expected = policy(segments).logps
    backward(expected, weights)
    without = gradients(model)
    model.zero_grad()
    policy.always_sees = True
    found = policy(segments).logps
    backward(found, weights)
    assert torch.equal(found, expected)
    assert all(parameter.grad is not None for parameter in parameters_of(model, "projector").values())
    assert all(
        torch.equal(value, without.get(name, torch.zeros_like(value))) for name, value in gradients(model).items()
    )


@pytest.mark.parametrize("family", [name for name in VISION_FAMILIES if name.startswith("qwen")])
def test_positions_are_the_models_own_and_ask_nothing_of_its_device(
    family: str, *, vision_folder: Callable[[str], Path]
) -> None:
    """The model has a device that nothing can be read back from; its own positions are those of each sequence by itself."""
    folder = vision_folder(family)
    section = ModelSection(name_or_path=str(folder))
    model = load_model(section, folder=folder, device="meta")
    vision = load_vision(section, folder=folder)
    assert vision is not None
    (first, _, second) = asked(folder)
    segments = (first.segment, second.segment)
    layout = packed_row(segments)
    placed = SegmentImages(model=model, segments=segments, vision=vision).placed(layout)
    assert placed.positions.shape == (3, 1, layout.ids.numel())
    wanted = []
    for one in (first, second):
        prompt = one.inputs["input_ids"]
        grids = {"image_grid_thw": one.inputs["image_grid_thw"]}
        for number, completion in enumerate(COMPLETIONS):
            row = torch.cat([prompt, torch.tensor([completion[:-1]], dtype=torch.long)], dim=1)
            kinds = (row == model.config.image_token_id).long()
            positions, _ = model.model.get_rope_index(row, mm_token_type_ids=kinds, **grids)
            wanted.append(positions[:, 0] if number == 0 else positions[:, 0, prompt.numel() :])
    assert torch.equal(placed.positions[:, 0], torch.cat(wanted, dim=1))
