"""A model that is only sampled from: no optimizer, no reference, and weights that nothing moves."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from grpo_cli.engine.build_sampling import build_weight_sync, held_out_sampling, policy_sampling, token_budget
from grpo_cli.engine.inputs import SamplingInputs
from grpo_cli.engine.rollouts import Told, open_rollouts
from grpo_cli.engine.settings import objective_settings
from grpo_cli.engine.step import GradientPass
from grpo_cli.engine.weight_sync import WeightSync
from grpo_cli.policy.fit import check_fit
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_model
from grpo_cli.rollout.sync.buckets import pack
from grpo_cli.rollout.sync.checksum import Checksum
from grpo_cli.types import PolicyVersion, Sampling

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedForSampling:
    """A model, ready to be sampled from.

    Attributes:
        policy: On its device.
        prepared: What is called instead of it, for log-probabilities.
        samplings: How completions of each dataset are drawn.
        checksum: Of all weights.
    """

    policy: PolicyModel
    prepared: nn.Module
    samplings: Sequence[Sampling]
    checksum: str


def load_for_sampling(
    inputs: SamplingInputs, *, adapters: Path | None, say: Callable[[str], None]
) -> LoadedForSampling:
    """Load the model that the recipe names.

    Args:
        inputs: What it samples for.
        adapters: Folder of the adapters that the recipe's `model.lora` describes; None: there are none.
        say: Told if sequences may be longer than the model was made for.

    Raises:
        ModelError: If it does not load, or does not fit the tokenizer or the lengths.
        CheckpointError: If the adapters do not fit it.
    """
    recipe = inputs.recipe
    model = load_model(recipe.model, folder=inputs.folder, device=inputs.strategy.loads_on, adapters=adapters)
    model.requires_grad_(False)
    # With the temperature of training, as the canary samples.
    sampling = policy_sampling(inputs, model)
    policy = PolicyModel(model, sampling=sampling, vision=inputs.vision)
    samplings = [held_out_sampling(one, recipe, trained=sampling) for one in inputs.held_out]
    misfit = check_fit(
        model,
        inputs.tokenizer,
        prompt_ids=inputs.first_prompt.ids,
        longest_prompt=max(one.longest_prompt for one in inputs.held_out),
        max_completion_length=max(one.max_tokens for one in samplings),
    )
    if misfit is not None:
        say(misfit)
    prepared = inputs.strategy.prepare_frozen(policy)
    checksum = Checksum()
    for bucket in pack(inputs.strategy.named_weights(policy), bucket_bytes=BUCKET_BYTES):
        checksum.add(bucket)
    return LoadedForSampling(policy=policy, prepared=prepared, samplings=samplings, checksum=checksum.value)


def open_sampler(inputs: SamplingInputs, loaded: LoadedForSampling, told: Told, stack: ExitStack) -> WeightSync:
    """Open the engine that the recipe names, and give it the weights.

    Args:
        inputs: What it samples for.
        loaded: The model.
        told: Of what the engine does.
        stack: Closes the engine.

    Raises:
        TrainingError: If the engine does not start, does not take the weights, or samples from others.
    """
    recipe, policy = inputs.recipe, loaded.policy
    rollouts = open_rollouts(inputs, policy, told, stack)
    gradients = GradientPass(
        processes=inputs.processes,
        strategy=inputs.strategy,
        settings=objective_settings(recipe.grpo, recipe.generation, recipe.vllm, router_aux_loss_coef=0.0),
        budget=token_budget(inputs, policy, told.say),
        shares_prefix=policy.shares_prefix,
        splits_prompts=False,
    )
    weight_sync = build_weight_sync(inputs, policy, loaded.prepared, rollouts, gradients)
    weight_sync.bring(PolicyVersion(0))
    return weight_sync
