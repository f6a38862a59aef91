"""What vLLM is asked for, without vLLM; that it samples so is tested with the engines."""

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from optional_packages import needs_vllm

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.vllm.sampling import first_seed, sampling_fields
from grpo_cli.types import Sampling


def test_every_setting_is_told(settings: Callable[..., Sampling]) -> None:
    sampling = settings(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        repetition_penalty=1.1,
        stop_ids=(3, 4),
        stop_strings=("END",),
        min_tokens=2,
        max_tokens=9,
    )
    fields = sampling_fields(sampling, n=4, seed=17)
    assert json.loads(json.dumps(fields)) == {
        "n": 4,
        "seed": 17,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "stop": ["END"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
        "logprobs": 0,
    }


def test_banned_tokens_get_the_lowest_bias_that_vllm_takes(settings: Callable[..., Sampling]) -> None:
    fields = sampling_fields(settings(banned_ids=(7, 9)), n=1, seed=0)
    assert json.loads(json.dumps(fields))["logit_bias"] == {"7": -100.0, "9": -100.0}


@pytest.mark.parametrize("n", [1, 8, 10_000])
def test_seeds_of_a_whole_group_have_63_bits(n: int) -> None:
    seeds = [first_seed((1, "train", step), "0:5", n=n) for step in range(200)]
    assert all(seed >= 0 and seed + n - 1 < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # they fill the range
    assert all(abs(later - earlier) > n for earlier, later in pairwise(sorted(seeds)))  # no two groups share a sample


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_would_change_is_refused(temperature: float, settings: Callable[..., Sampling]) -> None:
    with pytest.raises(TrainingError, match=rf"temperature: found {temperature}; vLLM samples with 0\.01 to 2"):
        sampling_fields(settings(temperature=temperature), n=1, seed=0)


def test_filters_that_vllm_takes_in_another_order_are_refused(settings: Callable[..., Sampling]) -> None:
    with pytest.raises(TrainingError, match=r"top_p 0\.9 with min_p 0\.1"):
        sampling_fields(settings(top_p=0.9, min_p=0.1), n=1, seed=0)
    assert sampling_fields(settings(temperature=0.0, top_p=0.9, min_p=0.1), n=1, seed=0)["n"] == 1


@pytest.mark.slow
@needs_vllm
def test_the_names_are_those_of_the_engine_and_of_the_server(settings: Callable[..., Sampling]) -> None:
    from grpo_cli.rollout.vllm.containment import Containment

    names = sampling_fields(settings(), n=1, seed=0).keys()
    with Containment()():
        from vllm import SamplingParams
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    assert names <= set(SamplingParams.__struct_fields__)
    assert names <= CompletionRequest.model_fields.keys()
