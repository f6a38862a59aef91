"""Choose the engine that samples, and open it."""

from contextlib import ExitStack
from typing import Any, Protocol

from grpo_cli.engine.inputs import SamplingInputs
from grpo_cli.engine.memory import automatic_cached_tokens
from grpo_cli.engine.spread_rollouts import SpreadRollouts
from grpo_cli.errors import TrainingError
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.recipe.schema import VllmSection
from grpo_cli.rollout.engine import RolloutEngine
from grpo_cli.rollout.local.engine import LocalEngine


class Told(Protocol):
    """Is told what an engine does, and shows it."""

    def say(self, line: str) -> None:
        """Show an information."""
        ...

    def progress(self, tokens: int) -> None:
        """Show that so many tokens more were sampled."""
        ...


def open_rollouts(inputs: SamplingInputs, policy: PolicyModel, told: Told, stack: ExitStack) -> RolloutEngine:
    """Open the engine that the recipe names.

    Args:
        inputs: What the run starts from.
        policy: On its device, prepared for training.
        told: Of what the engine does.
        stack: Closes the engine, and ends the server if this run started it.

    Raises:
        TrainingError: If vLLM does not start, or a server cannot be reached or does not fit the run.
    """
    processes = inputs.processes
    engine: RolloutEngine
    if processes.count == 1:
        engine = _open(inputs, policy, told, stack)
        stack.callback(engine.close)
    else:
        engines = count_engines(inputs.recipe.vllm, processes.count)
        elsewhere = inputs.recipe.vllm.mode == "server" and not processes.is_main
        own = None if elsewhere else _open(inputs, policy, told, stack)
        if own is not None:
            stack.callback(own.close)
        engine = SpreadRollouts(
            own, engines=engines, processes=processes, together=inputs.strategy.spread.weight_parts > 1
        )
    return engine


def count_engines(vllm: VllmSection, processes: int) -> int:
    """Count the engines that sample in a run; each is in an equal number of its processes.

    Args:
        vllm: The recipe's section.
        processes: Of the run.

    Raises:
        TrainingError: If an engine is to be spread over a number of processes by which theirs cannot be divided.
    """
    if vllm.mode == "server":  # one process talks to the servers, which may be many
        return 1
    if vllm.mode is None:
        return processes
    size = vllm.tensor_parallel_size
    if processes % size:
        allowed = [str(number) for number in range(1, processes + 1) if processes % number == 0]
        raise TrainingError(
            f"vllm.tensor_parallel_size: found {size}, but this run has {processes} process{'es' if processes > 1 else ''}, which "
            f"vllm.mode: colocate spreads each engine over; allowed: {', '.join(allowed)}",
            hint=f"start it with --nproc {size}, or a multiple of {size}",
        )
    return processes // size


def _open(inputs: SamplingInputs, policy: PolicyModel, told: Told, stack: ExitStack) -> RolloutEngine:
    recipe = inputs.recipe
    if recipe.vllm.mode is not None:
        # What only vLLM needs is not loaded without it.
        from grpo_cli.engine.vllm_rollouts import open_colocated, open_servers  # noqa: PLC0415

        if recipe.vllm.mode == "server":
            return open_servers(inputs, policy, told, stack)
        return open_colocated(inputs, policy, told)
    return LocalEngine(
        policy.model,
        inputs.tokenizer,
        max_num_seqs=recipe.generation.max_num_seqs,
        max_cached_tokens=automatic_cached_tokens(
            policy, train=recipe.train, processes=inputs.processes, spread=inputs.strategy.spread
        ),
        share_prefix=recipe.model.share_prefix,
        vision=inputs.vision,
        on_progress=told.progress,
        on_notice=told.say,
    )


def dtype_name(model: Any) -> str:
    """Name the precision of a model's weights, such as `float32`."""
    return str(model.dtype).removeprefix("torch.")
