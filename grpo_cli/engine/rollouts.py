"""Choose the engine that samples, and open it."""

from contextlib import ExitStack
from typing import Any, Protocol

from grpo_cli.engine.inputs import SamplingInputs
from grpo_cli.engine.memory import automatic_cached_tokens
from grpo_cli.engine.spread_rollouts import SpreadRollouts
from grpo_cli.policy.forward import PolicyModel
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
        elsewhere = inputs.division.main_only and not processes.is_main
        own = None if elsewhere else _open(inputs, policy, told, stack)
        if own is not None:
            stack.callback(own.close)
        engine = SpreadRollouts(
            own, division=inputs.division, processes=processes, together=inputs.strategy.spread.weight_parts > 1
        )
    return engine


def _open(inputs: SamplingInputs, policy: PolicyModel, told: Told, stack: ExitStack) -> RolloutEngine:
    recipe = inputs.recipe
    if recipe.vllm.mode is not None:
        # What only vLLM needs is not loaded without it.
        from grpo_cli.engine.vllm_rollouts import open_colocated, open_servers  # noqa: PLC0415

        if recipe.vllm.mode == "server":
            return open_servers(inputs, policy, told, stack)
        return open_colocated(inputs, policy, told)
    cached = automatic_cached_tokens(
        policy, train=recipe.train, processes=inputs.processes, spread=inputs.strategy.spread
    )
    with inputs.strategy.whole(policy):  # it looks at once how it can sample, as it will then
        return LocalEngine(
            policy.model,
            inputs.tokenizer,
            max_num_seqs=recipe.generation.max_num_seqs,
            max_cached_tokens=cached,
            share_prefix=recipe.model.share_prefix,
            vision=inputs.vision,
            on_progress=told.progress,
            on_notice=told.say,
        )


def dtype_name(model: Any) -> str:
    """Name the precision of a model's weights, such as `float32`."""
    return str(model.dtype).removeprefix("torch.")
