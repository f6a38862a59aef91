"""What a run is about to do, in numbers, for the console."""

from pathlib import Path

from grpo_cli.device_memory import total_memory
from grpo_cli.engine.demand import Demand
from grpo_cli.engine.inputs import Inputs
from grpo_cli.engine.memory import estimate_memory
from grpo_cli.engine.memory_estimate import MemoryEstimate
from grpo_cli.engine.rollouts import dtype_name
from grpo_cli.engine.shared_scoring import SharedScorer
from grpo_cli.engine.stages import Stages
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.recipe.adapters_in_words import adapters_in_words
from grpo_cli.recipe.addresses import server_addresses
from grpo_cli.recipe.schema import VllmSection
from grpo_cli.sharding import whole_shape
from grpo_cli.telemetry.plan import RunPlan


def run_plan(inputs: Inputs, stages: Stages, *, done_steps: int) -> RunPlan:
    """Compute the plan of a run from what was built."""
    recipe = inputs.recipe
    model = stages.policy.model
    budget = stages.gradients.budget
    longest = inputs.prompts.longest
    memory = _memory(inputs, stages)
    dtype = dtype_name(model)
    rows = stages.prompts.rows_per_epoch
    prompts = inputs.length.total_steps * recipe.train.prompts_per_step // recipe.grpo.num_iterations
    return RunPlan(
        run_name=recipe.run_name,
        model=recipe.model.name_or_path,
        adapters=adapters_in_words(recipe.model),
        parameters=sum(whole_shape(one).numel() for one in model.parameters()),
        trained_parameters=sum(whole_shape(one).numel() for one in model.parameters() if one.requires_grad),
        dtype=f"{dtype}, computing in bfloat16" if recipe.train.bf16 else dtype,
        device=str(stages.processes.device),
        processes=stages.processes.count,
        engine=_engine(recipe.vllm, stages.processes.count),
        dataset=recipe.dataset.name,
        rows=rows,
        rewards=dict(zip(stages.scorer.names, stages.advantage_settings.weights, strict=True)),
        spreads_rewards=not isinstance(stages.scorer, SharedScorer),
        loss_type=recipe.grpo.loss_type,
        prompts_per_step=recipe.train.prompts_per_step,
        num_generations=recipe.grpo.num_generations,
        steps_per_generation=recipe.grpo.steps_per_generation,
        num_iterations=recipe.grpo.num_iterations,
        total_steps=inputs.length.total_steps,
        epochs=None if rows is None else (inputs.length.total_prompts or prompts) / rows,
        done_steps=done_steps,
        longest_prompt=longest,
        max_completion_length=recipe.generation.max_completion_length,
        micro_batch_tokens=budget.tokens,
        automatic_micro_batches=budget.automatic,
        memory=memory.parts,
        memory_peak=memory.total,
        memory_available=total_memory(stages.processes.device),
        output_dir=_short(inputs.output_dir),
    )


def _memory(inputs: Inputs, stages: Stages) -> MemoryEstimate:
    """Estimate what this process will need."""
    recipe, policy, longest = inputs.recipe, stages.policy, inputs.prompts.longest_known
    return estimate_memory(
        policy,
        spread=stages.strategy.spread,
        device=stages.processes.device,
        train=recipe.train,
        generation=recipe.generation,
        demand=Demand.of(
            recipe,
            processes=stages.processes.count,
            micro_batch_tokens=stages.gradients.budget.tokens,
            longest_prompt=longest,
            shares_prefix=stages.gradients.shares_prefix,
            with_reference=stages.reference is not None and stages.reference.policy is not policy,
            vllm=_vllm_bytes(inputs, policy),
            sees=inputs.vision is not None,
        ),
    )


def _engine(vllm: VllmSection, processes: int) -> str | None:
    """Name the engine that samples, unless it is the built-in one."""
    if vllm.mode is None:
        return None
    if vllm.mode == "colocate":
        if processes == 1:
            return "vLLM in this process"
        return (
            f"vLLM in every {'process' if vllm.tensor_parallel_size == 1 else f'{vllm.tensor_parallel_size} processes'}"
        )
    addresses = server_addresses(vllm)
    many = f"s ({len(addresses)})" if len(addresses) > 1 else ""
    return f"vLLM server{many} {', '.join(addresses)}{', started by this run' if vllm.start else ''}"


def _vllm_bytes(inputs: Inputs, policy: PolicyModel) -> int | None:
    """Estimate what vLLM takes of this device's memory; None: the built-in engine samples."""
    if inputs.recipe.vllm.mode is None:
        return None
    from grpo_cli.engine.vllm_rollouts import vllm_bytes  # noqa: PLC0415  what only vLLM needs is not loaded without it

    return vllm_bytes(inputs, policy)


def _short(path: Path) -> Path:
    """Show a path from the working folder if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
