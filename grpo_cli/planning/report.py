"""A plan as text for a person."""

from rich.console import Console
from rich.table import Table

from grpo_cli.planning.machine import Machine
from grpo_cli.planning.plan import TrainingPlan
from grpo_cli.recipe.adapters_in_words import adapters_in_words
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.telemetry.readable import duration, magnitude, percent, short, size

WHAT = {
    "weights": "the policy's",
    "gradients": "of what is trained",
    "optimizer": "moments of AdamW, and the float32 weights that DeepSpeed moves",
    "reference": "weights of the second model (grpo.beta)",
    "gathered": "weights and gradients that are whole while a forward or backward uses them",
    "rounded": "copies of float32 weights in bfloat16 (train.bf16), until the backward",
    "activations": "what the backward keeps of a micro-batch",
    "head": "a chunk of logits, and gradients of head and embedding, as far as they come on top",
    "prompt_copies": "keys and values of prompts, a copy for each completion, where attention is with masks",
    "images": "what the backward keeps of images in the vision tower",
    "sampled": "copies of weights while the built-in engine samples: all that are in parts, and those in oneDNN's order",
    "cache": "keys and values of the built-in engine",
    "vllm": "vLLM's share (vllm.gpu_memory_utilization)",
}
"""By component of `MemoryEstimate`."""


def print_training_plan(console: Console, plan: TrainingPlan, *, model: ModelSection, machine: Machine) -> None:
    """Print a plan: lines, and the memory of a process as a table."""
    for label, text in _lines(plan, model, machine):
        console.print(f"{label:<10} {text}", soft_wrap=True, highlight=False, markup=False)
    console.print(_memory_table(plan), highlight=False)
    console.print(_verdict(plan, machine), soft_wrap=True, highlight=False, markup=False)


def _lines(plan: TrainingPlan, model: ModelSection, machine: Machine) -> list[tuple[str, str]]:
    count, trained = magnitude(plan.parameters), magnitude(plan.trained_parameters)
    of_these = "" if plan.trained_parameters == plan.parameters else f" ({trained} trained)"
    memory = "memory not known" if machine.memory is None else f"{size(machine.memory)} each"
    work, (slowest, share) = plan.work, plan.bottleneck
    adapters = adapters_in_words(model)
    dtype = str(plan.dtype).removeprefix("torch.")
    passes = ["a forward and backward"]
    passes += [f"{short(work.old_passes)} forwards for old log-probabilities"] if work.old_passes else []
    passes += [f"{short(work.reference_passes)} forwards of the reference"] if work.reference_passes else []
    parts = ", ".join(f"{name} {duration(value)}" for name, value in plan.seconds.items() if value)
    plural = "es" if machine.processes > 1 else ""
    step = f"{work.completions:,} completions; prompts up to {plan.longest_prompt:,} tokens; about {work.trained_tokens:,} tokens "
    step += f"through the policy, {work.sampled_tokens:,.0f} sampled"
    forwards = (
        f"{work.micro_batches:,} micro-batches of {plan.micro_batch_tokens:,} tokens in the busiest process, each with "
    )
    return [
        ("model", f"{model.name_or_path}, {count} parameters{of_these}, {dtype}"),
        *([] if adapters is None else [("adapters", adapters)]),
        ("machine", f"{machine.processes} process{plural} on {machine.device.type}, {memory}"),
        ("strategy", plan.spread.name + (f", since {plan.reason}" if plan.reason else "")),
        ("step", step),
        ("forwards", forwards + " and ".join(passes)),
        ("bottleneck", f"{slowest}, about {percent(share)} of a step (roughly: {parts})"),
    ]


def _memory_table(plan: TrainingPlan) -> Table:
    table = Table(title="memory of a process", title_justify="left")
    table.add_column("component")
    table.add_column("size", justify="right")
    table.add_column("what it is")
    parts = plan.memory.parts
    for name, what in WHAT.items():
        value = parts[name]
        if value != 0:
            table.add_row(name, "not known" if value is None else size(value), what)
    table.add_section()
    while_what = "training" if plan.memory.training >= plan.memory.sampling else "sampling"
    table.add_row("most at once", size(plan.memory.total), f"while {while_what}; the two take turns")
    return table


def _verdict(plan: TrainingPlan, machine: Machine) -> str:
    """Say whether it fits, and if not, what is too large and what would help."""
    total, memory = plan.memory.total, machine.memory
    if memory is None:
        return f"needs {size(total)}"
    if not plan.is_too_large(machine):
        return f"fits: {size(total)} of {size(memory)}"
    if plan.starves_vllm:
        needs = f"its weights and one sequence take {size(plan.vllm_needs)} of each device"
        return f"does not fit: vLLM has {size(plan.memory.vllm)} (vllm.gpu_memory_utilization), and {needs}: raise it, or vllm.tensor_parallel_size"
    parts = plan.memory.parts
    largest = sorted(parts, key=lambda name: -(parts[name] or 0))[:2]
    lines = [
        f"does not fit: {size(total)} of {size(memory)}; the largest parts are {' and '.join(largest)}",
        *(f"  fits with {one.change}: {size(one.total)}" for one in plan.remedies),
    ]
    return "\n".join(lines if plan.remedies else [*lines, "  no single change that was tried makes it fit"])
