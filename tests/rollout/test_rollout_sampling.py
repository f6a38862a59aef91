"""Sampling settings from recipe sections, the union of stop tokens, and seeds."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build_tiny_tokenizer
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from grpo_cli.errors import ModelError
from grpo_cli.recipe.schema import EvalSection, GenerationSection
from grpo_cli.rollout.sampling import evaluation_sampling, sample_seed, stop_token_ids, training_sampling
from grpo_cli.types import Sampling


@pytest.fixture
def own_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that the test may change."""
    return build_tiny_tokenizer()


def test_training_sampling_takes_every_generation_key() -> None:
    section = GenerationSection(
        max_completion_length=11,
        min_completion_length=2,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        stop=["a", "b"],
        stop_token_ids=[3],
    )
    assert training_sampling(section, stop_ids=(3, 9)) == Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        stop_ids=(3, 9),
        stop_strings=("a", "b"),
        min_tokens=2,
        max_tokens=11,
    )


def test_evaluation_sampling_takes_its_own_keys_and_the_lengths_and_stops_of_training() -> None:
    generation = GenerationSection(temperature=0.7, top_k=5, stop=["a"], min_completion_length=4)
    assert evaluation_sampling(EvalSection(), generation, stop_ids=(9,)) == Sampling(
        temperature=0.0, stop_ids=(9,), stop_strings=("a",), min_tokens=4, max_tokens=256
    )
    evaluation = EvalSection(
        temperature=1.5, top_p=0.8, top_k=2, min_p=0.3, repetition_penalty=1.1, max_completion_length=3
    )
    assert evaluation_sampling(evaluation, generation, stop_ids=(9,)) == Sampling(
        temperature=1.5,
        top_p=0.8,
        top_k=2,
        min_p=0.3,
        repetition_penalty=1.1,
        stop_ids=(9,),
        stop_strings=("a",),
        min_tokens=3,
        max_tokens=3,
    )


def test_stop_tokens_are_the_union_of_all_that_name_one(own_tokenizer: Any) -> None:
    own_tokenizer.eos_token = "<|endoftext|>"
    generation = GenerationConfig(eos_token_id=[7, 8])
    model = LlamaConfig(eos_token_id=5)
    # 259 from the tokenizer, 257 from its chat template, the others from the two configs and the recipe.
    assert stop_token_ids(own_tokenizer, generation, [3], model_config=model) == (3, 5, 7, 8, 257, 259)


@pytest.mark.parametrize(("eos", "expected"), [(7, (7,)), ([8, 7], (7, 8))], ids=str)
def test_a_generation_config_may_name_one_id_or_several(
    eos: int | list[int], expected: tuple[int, ...], own_tokenizer: Any
) -> None:
    own_tokenizer.eos_token = own_tokenizer.chat_template = None
    assert stop_token_ids(own_tokenizer, GenerationConfig(eos_token_id=eos)) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", (257, 259)),
        ("{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}", (256, 259)),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", (259,)),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", (259,)),
        ("{{ raise_exception('only tool calls') }}", (259,)),
        (
            "{% for m in messages %}{{ m.role }}{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}",
            (257, 259),
        ),
    ],
)
def test_the_token_that_closes_an_assistant_turn_is_a_stop_token(
    template: str, expected: tuple[int, ...], own_tokenizer: Any
) -> None:
    own_tokenizer.eos_token = "<|endoftext|>"
    own_tokenizer.chat_template = template
    assert stop_token_ids(own_tokenizer, None) == expected


def test_nothing_that_ends_a_completion_is_an_error(own_tokenizer: Any) -> None:
    own_tokenizer.eos_token = own_tokenizer.chat_template = None
    with pytest.raises(ModelError, match="nothing can end a completion") as caught:
        stop_token_ids(own_tokenizer, GenerationConfig(), model_config=LlamaConfig(eos_token_id=None))
    assert caught.value.hint == "name one in generation.stop_token_ids"
    assert stop_token_ids(own_tokenizer, GenerationConfig(), [4]) == (4,)


@pytest.mark.parametrize("token", [-1, 260])
def test_a_stop_token_outside_the_vocabulary_is_an_error(token: int, own_tokenizer: Any) -> None:
    with pytest.raises(ModelError, match=rf"stop_token_ids: {token} is no token; this tokenizer's ids are 0 to 259"):
        stop_token_ids(own_tokenizer, None, [token])


def test_seeds_tell_apart_whatever_differs() -> None:
    keys: list[tuple[tuple[int | str, ...], str, int]] = [
        ((1, "train", 2), "0:1", 0),
        ((1, "eval", 2), "0:1", 0),
        ((2, "train", 1), "0:1", 0),
        ((1, "train", 2), "0:1", 1),
        ((1, "train", 2), "0:11", 0),
        ((1, "train", "2"), "0:1", 0),
        ((1, "train2"), "0:1", 0),
        ((1, "train", 2, "0:1"), "", 0),
    ]
    seeds = {sample_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_fill_all_63_bits() -> None:
    seeds = [sample_seed((0,), "0:0", index) for index in range(200)]
    combined = 0
    for seed in seeds:
        combined |= seed
    assert combined == 2**63 - 1


def test_a_seed_is_the_same_in_another_process_and_for_ever(tmp_path: Path) -> None:
    """Resuming must draw what the uninterrupted run would have drawn, so this value is part of the checkpoint format.

    Its origin: `printf '[[42,"train",7],"0:3",1]' | b2sum -l 64`, shifted right by one bit.
    """
    code = "from grpo_cli.rollout.sampling import sample_seed; print(sample_seed((42, 'train', 7), '0:3', 1))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert int(output.stdout) == sample_seed((42, "train", 7), "0:3", 1) == 0x4705701C7E648979
