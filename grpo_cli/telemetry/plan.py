"""The plan of a run, printed before it starts: what is trained on what, how much a step is, what memory it may take."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from grpo_cli.telemetry.readable import magnitude, short, size, visible


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Everything a person should see before a run starts.

    Attributes:
        run_name: The run's name.
        model: What was loaded.
        adapters: What is trained, such as `rank 16, alpha 32, on all-linear`; None: the weights themselves.
        parameters: Number of parameters.
        trained_parameters: Those that the optimizer moves.
        dtype: Of the weights, such as `float32`; with what autocast computes in, such as `float32, computing in bfloat16`.
        device: Such as `cpu` or `cuda:0`.
        processes: How many train together.
        engine: Samples completions, such as `vLLM in this process`; None: the built-in engine.
        dataset: Where prompts come from.
        rows: Number of usable rows; None: streaming.
        rewards: Reward names and their weights.
        spreads_rewards: Whether each process scores what it sampled.
        loss_type: The objective.
        prompts_per_step: Prompts of one optimizer step.
        num_generations: Completions per prompt.
        steps_per_generation: Optimizer steps that share one generation.
        num_iterations: Passes over a generation.
        total_steps: Optimizer steps of the whole run.
        epochs: Passes over the dataset; None: streaming.
        done_steps: Steps that a resumed run has behind it.
        longest_prompt: Tokens of the longest prompt; None: not known.
        max_completion_length: Tokens of the longest completion.
        micro_batch_tokens: Most tokens in one forward.
        automatic_micro_batches: Whether that was found rather than asked for.
        memory: Estimated bytes by part; None: not known.
        memory_peak: Estimated most bytes at one time, of the known parts; less than their sum if some exclude each other.
        memory_available: Bytes that the device has; None: not known.
        output_dir: The run directory.
    """

    run_name: str
    model: str
    parameters: int
    trained_parameters: int
    dtype: str
    device: str
    adapters: str | None = None
    processes: int = 1
    engine: str | None = None
    dataset: str
    rows: int | None
    rewards: Mapping[str, float]
    spreads_rewards: bool = False
    loss_type: str
    prompts_per_step: int
    num_generations: int
    steps_per_generation: int
    num_iterations: int
    total_steps: int
    epochs: float | None
    done_steps: int = 0
    longest_prompt: int | None
    max_completion_length: int
    micro_batch_tokens: int
    automatic_micro_batches: bool = False
    memory: Mapping[str, int | None]
    memory_peak: int
    memory_available: int | None
    output_dir: Path


def print_plan(console: Console, plan: RunPlan) -> None:
    """Print the plan, one topic a line; lines are not wrapped."""
    console.print(Text(visible(plan.run_name), style="bold"))
    for label, value in plan_rows(plan):
        line = Text("  ").append(f"{label:<8}", style="dim").append(f"  {visible(value)}")
        console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)


def plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Write the plan as topics and sentences."""
    return [
        ("model", _model(plan)),
        *([] if plan.adapters is None else [("adapters", plan.adapters)]),
        *([] if plan.engine is None else [("engine", plan.engine)]),
        ("data", f"{plan.dataset}, {'streaming' if plan.rows is None else f'{plan.rows:,} rows'}"),
        ("rewards", _rewards(plan)),
        ("step", _step(plan)),
        ("run", _run(plan)),
        ("tokens", _tokens(plan)),
        ("memory", _memory(plan)),
        ("output", str(plan.output_dir)),
    ]


def _model(plan: RunPlan) -> str:
    count = f"{magnitude(plan.parameters)} parameters"
    if plan.trained_parameters != plan.parameters:
        count += f" ({magnitude(plan.trained_parameters)} trained)"
    where = f"{plan.device} in {plan.processes} processes" if plan.processes > 1 else plan.device
    return f"{plan.model}, {count}, {plan.dtype} on {where}"


def _rewards(plan: RunPlan) -> str:
    text = ", ".join(f"{name} x {short(weight)}" for name, weight in plan.rewards.items())
    if plan.processes == 1:
        return text
    return text + (
        "; each process scores what it sampled" if plan.spreads_rewards else "; the first process scores everything"
    )


def _step(plan: RunPlan) -> str:
    completions = plan.prompts_per_step * plan.num_generations
    return (
        f"{plan.prompts_per_step} prompts x {plan.num_generations} completions = {completions:,} completions, "
        f"loss {plan.loss_type}"
    )


def _run(plan: RunPlan) -> str:
    text = f"{plan.total_steps:,} steps"
    if plan.epochs is not None:
        text += f" ({short(plan.epochs)} epochs)"
    if plan.done_steps:
        text += f", {plan.done_steps:,} done"
    uses = plan.steps_per_generation * plan.num_iterations
    if uses == 1:
        return f"{text}, each on new completions"
    return (
        f"{text}, {uses} per generation of {plan.prompts_per_step * plan.steps_per_generation} prompts "
        f"({plan.steps_per_generation} steps x {plan.num_iterations} iterations)"
    )


def _tokens(plan: RunPlan) -> str:
    automatic = " (automatic)" if plan.automatic_micro_batches else ""
    micro_batch = f"micro-batches of {plan.micro_batch_tokens:,} tokens{automatic}"
    if plan.longest_prompt is None:
        return f"completions up to {plan.max_completion_length:,}, {micro_batch}"
    longest = plan.longest_prompt + plan.max_completion_length
    most = plan.prompts_per_step * plan.num_generations * longest
    return (
        f"prompts up to {plan.longest_prompt:,}, completions up to {plan.max_completion_length:,}, "
        f"a step up to {most:,}, {micro_batch}"
    )


def _memory(plan: RunPlan) -> str:
    known = [f"{name} {size(count)}" for name, count in plan.memory.items() if count]
    unknown = [f"{name} unknown" for name, count in plan.memory.items() if count is None]
    bound = f"at least {size(plan.memory_peak)}" if unknown else f"about {size(plan.memory_peak)} at most"
    text = f"{bound} ({', '.join(known + unknown)})"
    if plan.memory_available is None:
        return text
    text += f", {plan.device} has {size(plan.memory_available)}"
    return text if plan.memory_peak <= plan.memory_available else f"{text}: this may not fit"
