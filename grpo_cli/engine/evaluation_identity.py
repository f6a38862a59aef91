"""What the completions of an evaluation depend on, and what their rewards depend on besides: completions can be scored again."""

import dataclasses
from typing import Any

from grpo_cli.engine.evaluation_policy import LoadedForSampling
from grpo_cli.engine.held_out import HeldOut
from grpo_cli.engine.inputs import SamplingInputs
from grpo_cli.recipe.schema import VllmSection
from grpo_cli.types import Sampling

_PACE = ("isolated", "memory_limit", "concurrency", "calls_per_minute", "batch_size")
"""How a reward function is called. What decides whether it fails, such as its timeout, may change a reward."""


def sampled_with(
    inputs: SamplingInputs, policy: LoadedForSampling, held_out: HeldOut, sampling: Sampling
) -> dict[str, Any]:
    """Name all that the completions of a dataset depend on."""
    recipe = inputs.recipe
    return {
        "weights": policy.checksum,
        "prompts": held_out.prompt_digest(),
        "sampling": dataclasses.asdict(sampling),
        "num_generations": held_out.task.settings.num_generations,
        "seed": recipe.train.seed,
        "dtype": recipe.model.dtype,
        "bf16": recipe.train.bf16,
        "attn_implementation": recipe.model.attn_implementation,
        "vllm": None if recipe.vllm.mode is None else _engine(recipe.vllm),
    }


def scored_with(held_out: HeldOut) -> dict[str, Any]:
    """Name all that the rewards and answers of given completions depend on, but for the code of functions."""
    rewards = held_out.task.rewards
    return {
        "rows": held_out.row_digest(),
        "reward_funcs": [
            {key: value for key, value in dataclasses.asdict(entry).items() if key not in _PACE}
            for entry in rewards.reward_funcs
        ],
        "reward_weights": list(held_out.weights),
        "on_error": rewards.on_error,
        "error_value": rewards.error_value,
        "answer_function": held_out.task.settings.answer_function,
    }


def _engine(vllm: VllmSection) -> dict[str, Any]:
    """Name what changes vLLM's arithmetic, and where it cuts completions."""
    return {
        "mode": vllm.mode,
        "dtype": vllm.dtype,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "max_model_length": vllm.max_model_length,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "engine": vllm.engine,
    }
