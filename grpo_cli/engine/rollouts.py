"""Choose the engine that samples, and open it."""

from contextlib import ExitStack
from typing import Any

from grpo_cli.engine.inputs import Inputs
from grpo_cli.engine.memory import automatic_cached_tokens
from grpo_cli.engine.spread_rollouts import SpreadRollouts
from grpo_cli.errors import TrainingError
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.rollout.engine import RolloutEngine
from grpo_cli.rollout.local.engine import LocalEngine
from grpo_cli.telemetry.recorder import Recorder


def open_rollouts(inputs: Inputs, policy: PolicyModel, recorder: Recorder, stack: ExitStack) -> RolloutEngine:
    """Open the engine that the recipe names.

    Args:
        inputs: What the run starts from.
        policy: On its device, prepared for training.
        recorder: Told of progress.
        stack: Closes the engine, and ends the server if this run started it.

    Raises:
        TrainingError: If vLLM does not start, or a server cannot be reached or does not fit the run.
    """
    processes = inputs.processes
    engine: RolloutEngine
    if processes.count == 1:
        engine = _open(inputs, policy, recorder, stack)
    else:
        alone = inputs.recipe.vllm.mode == "server"  # one process talks to the servers
        own = None if alone and not processes.is_main else _open(inputs, policy, recorder, stack)
        engine = SpreadRollouts(own, alone=alone, processes=processes)
    stack.callback(engine.close)
    return engine


def _open(inputs: Inputs, policy: PolicyModel, recorder: Recorder, stack: ExitStack) -> RolloutEngine:
    recipe = inputs.recipe
    if recipe.vllm.mode is not None:
        # What only vLLM needs is not loaded without it.
        from grpo_cli.engine.vllm_rollouts import open_colocated, open_servers  # noqa: PLC0415

        if recipe.vllm.mode == "server":
            return open_servers(inputs, policy, recorder, stack)
        if inputs.processes.count > 1:
            raise TrainingError(
                f"vllm.mode: colocate works in one process so far; this run has {inputs.processes.count}",
                hint="use vllm.mode: server, or leave it out for the built-in engine",
            )
        return open_colocated(inputs, policy, recorder)
    return LocalEngine(
        policy.model,
        inputs.tokenizer,
        max_num_seqs=recipe.generation.max_num_seqs,
        max_cached_tokens=automatic_cached_tokens(policy, train=recipe.train, processes=inputs.processes),
        share_prefix=recipe.model.share_prefix,
        on_progress=recorder.progress,
        on_notice=recorder.say,
    )


def dtype_name(model: Any) -> str:
    """Name the precision of a model's weights, such as `float32`."""
    return str(model.dtype).removeprefix("torch.")
