"""From a recipe to stages: the only place that knows both.

What is cheap and likely to be wrong comes first: rewards, dataset, tokenizer, and only then the model.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from grpo_cli.device_memory import release_unused
from grpo_cli.engine.build_sampling import build_evaluator, build_weight_sync, policy_sampling, token_budget
from grpo_cli.engine.checkpoint_store import CheckpointStore
from grpo_cli.engine.continued import begun_adapters, keeps_reference
from grpo_cli.engine.demand import image_tokens
from grpo_cli.engine.export import MODEL_FOLDER, REFERENCE_FOLDER
from grpo_cli.engine.health import RunHealth
from grpo_cli.engine.inputs import Inputs
from grpo_cli.engine.optimizer import build_optimizer, build_schedule
from grpo_cli.engine.recent_rewards import RewardMemory
from grpo_cli.engine.recording import Recording
from grpo_cli.engine.rewarding import RewardedByEach, RewardedByMain, Rewarding
from grpo_cli.engine.rollouts import open_rollouts
from grpo_cli.engine.settings import objective_settings
from grpo_cli.engine.shared_scoring import SharedScorer
from grpo_cli.engine.stages import Stages
from grpo_cli.engine.step import GradientPass
from grpo_cli.errors import CheckpointError
from grpo_cli.objective.advantages import AdvantageSettings, MultiObjectiveAggregation, ScaleRewards
from grpo_cli.policy.adapters import has_adapters, with_reference_adapters, without_adapters
from grpo_cli.policy.agreement import choose_forward
from grpo_cli.policy.checkpointing import possible_checkpointing, set_checkpointing
from grpo_cli.policy.fit import check_fit
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_model
from grpo_cli.policy.load_vision import processor_files
from grpo_cli.policy.locate import with_weights_in
from grpo_cli.policy.reference import AdapterReference, Reference, ReferenceModel
from grpo_cli.policy.router import router_coefficient
from grpo_cli.policy.weights_below import base_file
from grpo_cli.sharding import whole_bytes, whole_shape
from grpo_cli.telemetry.recorder import Recorder
from grpo_cli.types import Prompt, Sampling, Segment


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPolicy:
    """The model, loaded and checked.

    Attributes:
        policy: On its device.
        prepared: What is called instead of it in training.
        schedule: Of its learning rate.
        trained_shapes: Shapes of the parameters that the optimizer moves, in its order.
        reference: The reference of the KL term, if there is one.
        sampling: How training completions are drawn.
        router_aux_loss_coef: Weight of the load-balancing loss; 0 for a model without routers.
        notices: What to tell a person about the model.
    """

    policy: PolicyModel
    prepared: nn.Module
    schedule: LambdaLR
    trained_shapes: Sequence[torch.Size]
    reference: Reference | None
    sampling: Sampling
    router_aux_loss_coef: float
    notices: Sequence[str]


def load_policy(inputs: Inputs) -> LoadedPolicy:
    """Load the policy, from the checkpoint if there is one, and its reference.

    Raises:
        ModelError: If it does not load, does not fit the recipe's lengths or tokenizer, or is not deterministic.
        CheckpointError: If the checkpoint has no adapters where the recipe asks for them, or others.
    """
    recipe = inputs.recipe
    model = _policy_model(inputs)
    is_cut = inputs.strategy.spread.cuts_weights
    set_checkpointing(model, possible_checkpointing(model, recipe.train.gradient_checkpointing, cut=is_cut))
    sampling = policy_sampling(inputs, model)
    policy = PolicyModel(model, sampling=sampling, vision=inputs.vision)
    policy.always_sees = inputs.vision is not None and is_cut
    prompt, completion = inputs.prompts.longest, recipe.generation.max_completion_length
    misfit = check_fit(
        model,
        inputs.tokenizer,
        prompt_ids=inputs.prompts.probe.ids,
        longest_prompt=None if prompt is None else max([prompt, *(one.longest_prompt for one in inputs.held_out)]),
        max_completion_length=max(
            [completion, *(one.task.settings.max_completion_length or 0 for one in inputs.held_out)]
        ),
    )
    reference = _reference_model(inputs, model)
    optimizer = build_optimizer(model, recipe.train, device=inputs.processes.device)
    schedule = build_schedule(optimizer, recipe.train, total_steps=inputs.length.total_steps)
    shapes = [whole_shape(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    prepared = inputs.strategy.prepare(policy, optimizer, max_grad_norm=recipe.train.max_grad_norm)
    longest = None if prompt is None else prompt + completion
    with inputs.processes.autocast():
        slower = choose_forward(
            policy,
            _probe(inputs.prompts.probe, sampling.banned_ids),
            share_prefix=recipe.model.share_prefix,
            longest=longest,
            with_gradients=not inputs.strategy.in_step,
        )
    release_unused(inputs.processes.device)  # of the comparison: nothing later has its sizes
    return LoadedPolicy(
        policy=policy,
        prepared=prepared,
        schedule=schedule,
        trained_shapes=shapes,
        reference=_build_reference(inputs, policy, prepared, reference, longest),
        sampling=sampling,
        router_aux_loss_coef=router_coefficient(model, recipe.grpo.router_aux_loss_coef),
        notices=[*filter(None, [misfit, _cost_of_sampling(inputs, policy)]), *slower],
    )


def _policy_model(inputs: Inputs) -> Any:
    """Load the policy's model, from the checkpoint if there is one."""
    section, adapters = inputs.recipe.model, None
    if inputs.checkpoint is not None:
        trained = (inputs.checkpoint / MODEL_FOLDER).resolve()
        if section.lora is None:
            section = with_weights_in(section, trained)
        else:
            adapters = trained
    with inputs.strategy.building():
        return load_model(
            section,
            folder=inputs.folder,
            device=inputs.strategy.loads_on,
            adapters=adapters,
            begun=begun_adapters(inputs.recipe, inputs.folder, checkpoint=inputs.checkpoint),
            keeps_reference=keeps_reference(inputs.recipe),
        )


def _cost_of_sampling(inputs: Inputs, policy: PolicyModel) -> str | None:
    """Say what the built-in engine costs where weights are cut into parts."""
    if inputs.strategy.spread.weight_parts == 1 or inputs.recipe.vllm.mode is not None:
        return None
    size = sum(map(whole_bytes, policy.parameters()))
    return (
        f"{inputs.strategy.spread.name}: while a process samples it holds all weights, {size / 2**30:,.1f} GiB; with vllm.mode: server it "
        "does not have to"
    )


def build_stages(inputs: Inputs, loaded: LoadedPolicy, recorder: Recorder, stack: ExitStack) -> Stages:
    """Put everything together.

    Args:
        inputs: What the run starts from.
        loaded: The policy.
        recorder: What the run is told to.
        stack: Closes the rollout engine.

    Raises:
        TrainingError: If the rollout engine cannot be started or reached.
    """
    recipe, processes = inputs.recipe, inputs.processes
    rollouts = open_rollouts(inputs, loaded.policy, recorder, stack)
    advantage_settings = AdvantageSettings(
        weights=tuple(recipe.rewards.reward_weights or [1.0] * len(inputs.scorer.names)),
        scale_rewards=ScaleRewards(recipe.grpo.scale_rewards),
        multi_objective_aggregation=MultiObjectiveAggregation(recipe.grpo.multi_objective_aggregation),
    )
    rollouts.rest()  # the budget is for the time when nobody samples
    gradients = GradientPass(
        processes=processes,
        strategy=inputs.strategy,
        settings=objective_settings(
            recipe.grpo, recipe.generation, recipe.vllm, router_aux_loss_coef=loaded.router_aux_loss_coef
        ),
        budget=token_budget(inputs, loaded.policy, recorder.say, image_tokens=_image_tokens(inputs, loaded.policy)),
        shares_prefix=loaded.policy.shares_prefix,
        # The backward of a prompt that several micro-batches share is one that other processes may not have.
        splits_prompts=loaded.policy.splits_prompts and not inputs.strategy.in_step,
    )
    weight_sync = build_weight_sync(inputs, loaded.policy, loaded.prepared, rollouts, gradients)
    return Stages(
        processes=processes,
        division=inputs.division,
        strategy=inputs.strategy,
        tokenizer=inputs.tokenizer,
        model_files=_model_files(inputs),
        prompts=inputs.prompts.source,
        weight_sync=weight_sync,
        sampling=loaded.sampling,
        scorer=inputs.scorer,
        rewarding=_build_rewarding(inputs),
        reward_memory=RewardMemory(inputs.scorer.names),
        advantage_settings=advantage_settings,
        gradients=gradients,
        policy=loaded.policy,
        prepared=loaded.prepared,
        reference=loaded.reference,
        schedule=loaded.schedule,
        trained_shapes=loaded.trained_shapes,
        evaluator=build_evaluator(inputs, weight_sync, trained=loaded.sampling),
        health=RunHealth(),
        checkpoints=CheckpointStore(inputs.output_dir / "checkpoints", keep=recipe.train.keep_checkpoints),
        recorder=recorder,
        recipe=dataclasses.asdict(recipe),
    )


def _model_files(inputs: Inputs) -> Mapping[str, bytes]:
    """Give what is saved with every model beside its weights and the tokenizer, by the main process."""
    section, folder = inputs.recipe.model, inputs.folder
    files = processor_files(section, folder=folder, vision=inputs.vision)
    if section.lora is None or not inputs.processes.is_main:
        return files
    return files | base_file(section, folder)


def _image_tokens(inputs: Inputs, policy: PolicyModel) -> int | None:
    """Count the tokens of a step that may stand for parts of images; None: not known."""
    if inputs.vision is None:
        return 0
    longest = inputs.prompts.longest
    if longest is None:
        return None
    return image_tokens(
        inputs.recipe,
        processes=inputs.processes.count,
        longest_prompt=longest,
        shares_prefix=policy.shares_prefix,
    )


def _build_rewarding(inputs: Inputs) -> Rewarding:
    """Choose who scores."""
    scorer, processes, division, grpo = inputs.scorer, inputs.processes, inputs.division, inputs.recipe.grpo
    recording = Recording(
        settings=inputs.recipe.logging,
        steps_per_window=grpo.steps_per_generation * grpo.num_iterations,
        num_generations=grpo.num_generations,
    )
    if processes.count == 1 or isinstance(scorer, SharedScorer):
        return RewardedByMain(scorer=scorer, processes=processes, division=division, recording=recording)
    return RewardedByEach(
        scorer=scorer, processes=processes, division=division, recording=recording, seed=inputs.recipe.train.seed
    )


def _reference_model(inputs: Inputs, model: Any) -> Any:
    """Make the model that completions are compared with: the recipe's, or one that has moved from there.

    Returns:
        None if there is to be none, or it is the policy with other adapters.

    Raises:
        CheckpointError: If it is to move, and the checkpoint's did not.
    """
    grpo, section, checkpoint = inputs.recipe.grpo, inputs.recipe.model, inputs.checkpoint
    if grpo.beta == 0.0 or has_adapters(model):
        return None
    if checkpoint is None and not inputs.strategy.spread.cuts_weights:
        return copy.deepcopy(model)
    if grpo.sync_ref_model and checkpoint is not None:
        moved = checkpoint / REFERENCE_FOLDER
        if not moved.is_dir():
            raise CheckpointError(
                f"{checkpoint} has no reference model: it was written without grpo.sync_ref_model, or by an older version",
                hint="resume with the recipe and the version that the run was started with",
            )
        section = with_weights_in(section, moved.resolve())
    with inputs.strategy.building():
        return load_model(section, folder=inputs.folder, device=inputs.strategy.loads_on)


def _build_reference(
    inputs: Inputs, policy: PolicyModel, prepared: nn.Module, model: Any, longest: int | None
) -> Reference | None:
    """Make the reference of the KL term, if there is one, of its model."""
    grpo = inputs.recipe.grpo
    if grpo.beta == 0.0:
        return None
    if model is None:
        goes_on = keeps_reference(inputs.recipe)
        return AdapterReference(policy, prepared, switched=with_reference_adapters if goes_on else without_adapters)
    reference = PolicyModel(model, sampling=policy.sampling, vision=policy.vision)
    reference.full_logits = policy.full_logits
    reference.attends_in_blocks = policy.attends_in_blocks
    reference.always_sees = policy.always_sees
    if policy.shares_prefix:
        reference.share_prefix(longest)
    return ReferenceModel(
        reference,
        prepare=inputs.strategy.prepare_frozen,
        mixup_alpha=grpo.ref_model_mixup_alpha,
        sync_steps=grpo.ref_model_sync_steps if grpo.sync_ref_model else 0,
    )


def _probe(prompt: Prompt, banned: Sequence[int]) -> tuple[Segment, ...]:
    """Make segments to compare ways of computing log-probabilities on: a real prompt, continued by its own tokens."""
    # A part is enough to tell ways of computing apart, and a second or two on a CPU; images stay whole.
    ids = prompt.ids if prompt.images else prompt.ids[:96]
    text = tuple(token for token in ids if token not in banned)[-96:]
    return (
        Segment(prompt_ids=ids, completion_ids=(text[:8], text[:3], text[-1:]), images=prompt.images),
        Segment(prompt_ids=text[: len(text) // 2 + 1], completion_ids=(text[-5:], text[:6])),
    )
