"""What samples, built of a recipe: the engine's weights and the check of them, and evaluations during training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from grpo_cli.engine.canary import Canary, rounding
from grpo_cli.engine.evaluation import Evaluator
from grpo_cli.engine.held_out import HeldOut
from grpo_cli.engine.inputs import SamplingInputs
from grpo_cli.engine.memory import automatic_micro_batch_tokens
from grpo_cli.engine.step import GradientPass
from grpo_cli.engine.token_budget import TokenBudget
from grpo_cli.engine.weight_sync import WeightSync
from grpo_cli.policy.adapter_weights import MergedWeights
from grpo_cli.policy.adapters import has_adapters
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.quantization import DequantizedWeights
from grpo_cli.precision import computing_dtype, rounded_once
from grpo_cli.recipe.schema import Recipe
from grpo_cli.rollout.engine import RolloutEngine
from grpo_cli.rollout.sampling import evaluation_sampling, stop_token_ids, training_sampling
from grpo_cli.types import Sampling
from grpo_cli.vision.inputs import placeholder_ids


def build_weight_sync(
    inputs: SamplingInputs,
    policy: PolicyModel,
    prepared: nn.Module,
    rollouts: RolloutEngine,
    gradients: GradientPass,
) -> WeightSync:
    """Make what gives the engine its weights; one that has a copy of them gets the names of a checkpoint, and a canary.

    Args:
        inputs: What the run starts from.
        policy: On its device.
        prepared: What is called instead of it.
        rollouts: The engine.
        gradients: Computes the policy's log-probabilities for the canary.
    """
    weights, autocast = inputs.strategy.named_weights(policy), inputs.processes.autocast
    if rollouts.weight_copies == 0:
        return WeightSync(rollouts, weights, canary=None, sampling=partial(_sampling_with_the_policy, inputs, policy))
    from grpo_cli.rollout.sync.names import checkpoint_names  # noqa: PLC0415  what only vLLM needs is not loaded without it

    weights = DequantizedWeights(policy.model, weights)
    if has_adapters(policy.model):
        weights = MergedWeights(policy.model, weights)
    weights = checkpoint_names(policy.model, weights)
    canary = _build_canary(inputs, policy, prepared, rollouts, gradients)
    return WeightSync(rollouts, weights, canary, sampling=autocast)


@contextmanager
def _sampling_with_the_policy(inputs: SamplingInputs, policy: PolicyModel) -> Iterator[None]:
    """Let an engine without weights of its own use the policy's, all of them and in this run's precision."""
    with inputs.strategy.whole(policy), inputs.processes.autocast(keeps_weights=True), rounded_once(policy):
        yield


def _build_canary(
    inputs: SamplingInputs,
    policy: PolicyModel,
    prepared: nn.Module,
    rollouts: RolloutEngine,
    gradients: GradientPass,
) -> Canary:
    """Make the check of an engine that has a copy of the weights."""
    from grpo_cli.engine.vllm_rollouts import sampling_dtype  # noqa: PLC0415  what only vLLM needs is not loaded without it

    recipe, asked = inputs.recipe, inputs.recipe.vllm.canary_tolerance
    with inputs.processes.autocast():
        trains_in = str(computing_dtype(policy)).removeprefix("torch.")
    samples_in = sampling_dtype(recipe, policy)
    return Canary(
        rollouts=rollouts,
        division=inputs.division,
        gradients=gradients,
        policy=prepared,
        prompt=inputs.first_prompt,
        sampling=policy.sampling,
        tolerance=asked,
        rounding=rounding(trains_in, samples_in),
        every=recipe.vllm.canary_steps,
        first=2 if has_adapters(policy.model) else 1,
        seed=recipe.train.seed,
    )


def token_budget(
    inputs: SamplingInputs, policy: PolicyModel, say: Callable[[str], None], *, image_tokens: int | None = 0
) -> TokenBudget:
    """Take the budget that the recipe asks for, or find one; all models are on the device by now.

    Args:
        inputs: What the run starts from.
        policy: On its device.
        say: Told when it is lowered.
        image_tokens: Most tokens of a step that are trained on and stand for parts of images; None: not known.
    """
    train, processes = inputs.recipe.train, inputs.processes
    asked = train.micro_batch_tokens
    tokens = asked
    if tokens is None:
        tokens = automatic_micro_batch_tokens(
            policy,
            train=train,
            processes=processes,
            spread=inputs.strategy.spread,
            group=inputs.recipe.grpo.num_generations if policy.shares_prefix else 0,
            image_tokens=image_tokens,
        )
    return TokenBudget(
        tokens,
        asked=asked,
        device=processes.device,
        say=say,
        sharing=processes.sharing_memory,
        falls=not inputs.strategy.in_step,
    )


def build_evaluator(inputs: SamplingInputs, weight_sync: WeightSync, *, trained: Sampling) -> Evaluator | None:
    """Make the evaluator, if the recipe has held-out prompts.

    Args:
        inputs: What the run starts from.
        weight_sync: Samples from the newest weights.
        trained: How completions are drawn in training.
    """
    if not inputs.held_out:
        return None
    return Evaluator(
        held_out=inputs.held_out,
        samplings=[held_out_sampling(one, inputs.recipe, trained=trained) for one in inputs.held_out],
        weight_sync=weight_sync,
        processes=inputs.processes,
        division=inputs.division,
        seed=inputs.recipe.train.seed,
    )


def policy_sampling(inputs: SamplingInputs, model: Any) -> Sampling:
    """Say how completions of training are drawn from a model, with everything that ends one."""
    recipe = inputs.recipe
    stop_ids = stop_token_ids(
        inputs.tokenizer, model.generation_config, recipe.generation.stop_token_ids, model_config=model.config
    )
    return training_sampling(
        recipe.generation,
        stop_ids=stop_ids,
        banned_ids=placeholder_ids(model.config),
        regex=recipe.vllm.structured_outputs_regex,
    )


def held_out_sampling(held_out: HeldOut, recipe: Recipe, *, trained: Sampling) -> Sampling:
    """Say how completions of a dataset to evaluate on are drawn, from how they are in training."""
    return evaluation_sampling(
        held_out.task.settings,
        recipe.generation,
        stop_ids=trained.stop_ids,
        banned_ids=trained.banned_ids,
        regex=recipe.vllm.structured_outputs_regex,
    )
