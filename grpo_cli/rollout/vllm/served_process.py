"""The process that runs vLLM's HTTP server, started by `supervisor.py`: `python -m grpo_cli.rollout.vllm.served_process ARGUMENTS`.

vLLM's processes import this module again as `__mp_main__` before anything else, so its top must stay light.
"""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grpo_cli.parent_death import signal_at_parents_death
from grpo_cli.recipe.addresses import TOKEN_VARIABLE
from grpo_cli.rollout.vllm.limits import Limits
from grpo_cli.rollout.vllm.middleware import Application, Gate, Scope

SUPERVISOR_VARIABLE = "GRPO_VLLM_SUPERVISOR"
INSTANCE_VARIABLE = "GRPO_VLLM_INSTANCE"
"""How its supervisor calls this start of it."""
MAX_BODY_VARIABLE = "GRPO_VLLM_MAX_BODY_MIB"
MAX_GENERATIONS_VARIABLE = "GRPO_VLLM_MAX_NUM_GENERATIONS"
_OPENED_AT_ONCE = 4
"""Prompts whose images are prepared: open they take much more memory than encoded, and vLLM prepares one prompt at a time."""
_LOOK_SECONDS = 0.5


class ServedGate(Gate):
    """The gate of a served vLLM, as vLLM's `--middleware` makes it; its settings are in the environment."""

    def __init__(self, app: Application) -> None:
        limits = Limits(
            max_body_bytes=int(os.environ[MAX_BODY_VARIABLE]) << 20,
            max_num_generations=int(os.environ[MAX_GENERATIONS_VARIABLE]),
        )
        super().__init__(
            app,
            token=os.environ.get(TOKEN_VARIABLE),
            limits=limits,
            engine=ServedEngine(),
            instance=os.environ.get(INSTANCE_VARIABLE),
        )


class ServedEngine:
    """The engine behind vLLM's HTTP server."""

    def __init__(self) -> None:
        self._opening = asyncio.Semaphore(_OPENED_AT_ONCE)
        self._threads = ThreadPoolExecutor(_OPENED_AT_ONCE, thread_name_prefix="images")

    def description(self, scope: Scope) -> dict[str, Any]:
        """Give what does not change while it runs."""
        import vllm  # noqa: PLC0415  only where vLLM runs

        from grpo_cli import __version__  # noqa: PLC0415
        from grpo_cli.rollout.vllm.fit import model_sizes  # noqa: PLC0415
        from grpo_cli.rollout.vllm.prompt_images import images_per_prompt  # noqa: PLC0415

        config = scope["app"].state.engine_client.vllm_config
        sight = config.model_config.multimodal_config
        return {
            "grpo": __version__,
            "model": config.model_config.served_model_name,
            "sizes": model_sizes(config.model_config.hf_config),
            "world_size": config.parallel_config.world_size_across_dp,
            "vllm": vllm.__version__,
            "device": str(config.device_config.device_type),
            "max_model_len": config.model_config.max_model_len,
            "max_images": images_per_prompt(scope["app"].state.engine_client),
            "image_options": {} if sight is None else sight.mm_processor_kwargs or {},
            "max_lora_rank": 0 if config.lora_config is None else config.lora_config.max_lora_rank,
            # Each copy of the model has a scheduler of its own.
            "max_num_seqs": config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
        }

    async def complete(self, scope: Scope, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Complete a prompt with images. See `completed_after_images`."""
        from grpo_cli.rollout.vllm.served_images import completed_after_images  # noqa: PLC0415  only where vLLM runs

        engine = scope["app"].state.engine_client
        return await completed_after_images(engine, asked, opening=self._opening, threads=self._threads)

    async def settle(self, scope: Scope) -> None:
        """Forget what old weights saw in images, have the workers use the adapters that came, and let requests name them."""
        state = scope["app"].state
        await state.engine_client.reset_encoder_cache()
        if state.engine_client.vllm_config.lora_config is None:
            return
        from grpo_cli.rollout.vllm.adapter_loading import adapter_request  # noqa: PLC0415  only where vLLM runs

        await state.engine_client.collective_rpc("grpo_activate_adapters")
        request = adapter_request()
        state.openai_serving_models.lora_requests[request.lora_name] = request

    async def checksum(self, scope: Scope) -> str | None:
        """Ask the workers what they received; several checksums mean that they differ."""
        rpc = scope["app"].state.engine_client.collective_rpc
        # Of several copies of the model, all are asked and the first one's answers come back; but errors come from all.
        found = {weights["checksum"] for weights in await rpc("grpo_weights")} - {None}
        if len(found) != 1:
            return ",".join(sorted(found)) or None
        (checksum,) = found
        try:
            await rpc("grpo_check", args=(checksum,))
        except Exception as error:  # noqa: BLE001  whatever it is, these are not the weights that were sent
            return f"{checksum} in the first copy of the model; another: {error}"
        return str(checksum)


def end_with_supervisor() -> None:
    """End this process and all of its group as soon as the one that started it is gone, however it went."""
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor is not None:
        threading.Thread(target=_watch, args=(int(supervisor),), daemon=True, name="watch-supervisor").start()


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(_LOOK_SECONDS)
    from grpo_cli.rollout.vllm.process_group_end import kill_group  # noqa: PLC0415  needed once, at the very end

    kill_group(os.getpgrp())
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Run `vllm serve ARGUMENTS` in this process.

    Its installed command looks for a distribution of the name `vllm`, which the CPU builds are not.
    """
    end_with_supervisor()
    gc.disable()  # as in `cli.train`
    from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: PLC0415  seconds
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    gc.freeze()
    gc.enable()
    parser = FlexibleArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    parsed = parser.parse_args(["serve", *arguments])
    if current_platform.is_cpu():
        _settle_on_cpu(parsed.tensor_parallel_size, parsed.data_parallel_size)
    command.validate(parsed)
    command.cmd(parsed)


def _settle_on_cpu(tensor_parallel_size: int, data_parallel_size: int) -> None:
    """Choose what a CPU wants, where the environment is silent."""
    if tensor_parallel_size == 1:
        # One process less to start: the worker lives in the engine's process.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if tensor_parallel_size * data_parallel_size > 1:
        # Left to itself vLLM wants a NUMA node for each worker.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


if __name__ == "__mp_main__":
    signal_at_parents_death(signal.SIGKILL)  # vLLM's engine outlives a server that was killed, and holds its memory
    gc.disable()
    import vllm.v1.engine.core  # noqa: F401  which they import in any case

    gc.freeze()
    gc.enable()
elif __name__ == "__main__":
    main(sys.argv[1:])
