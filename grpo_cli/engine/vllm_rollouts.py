"""vLLM as the engine that samples: in the processes that train, or in servers that run already or are started here."""

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import torch

from grpo_cli.device_memory import total_memory
from grpo_cli.engine.division import count_engines
from grpo_cli.engine.inputs import SamplingInputs
from grpo_cli.engine.rollouts import Told, dtype_name
from grpo_cli.engine.started_server import StartedServerEngine, wait_for
from grpo_cli.errors import ModelError
from grpo_cli.policy.adapter_weights import AdapterWeights, FrozenWeights
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.load import load_config, prepared_location
from grpo_cli.policy.quantization import DequantizedWeights
from grpo_cli.recipe.addresses import is_loopback, server_addresses
from grpo_cli.recipe.schema import Recipe
from grpo_cli.rollout.cached_values import cached_values_per_token
from grpo_cli.rollout.engine import RolloutEngine
from grpo_cli.rollout.sync.adapters import Adapters
from grpo_cli.rollout.sync.names import checkpoint_names
from grpo_cli.rollout.sync.transports import WeightTransport, address_towards, build_transport, choose_transport
from grpo_cli.rollout.vllm.arguments import (
    engine_arguments,
    lora_rank_to_send,
    read_token,
    resolved_dtype,
    vllm_version,
)
from grpo_cli.rollout.vllm.client import VllmClient
from grpo_cli.rollout.vllm.colocate import ColocateEngine
from grpo_cli.rollout.vllm.fit import Needs, model_sizes
from grpo_cli.rollout.vllm.limits import MAX_NUM_GENERATIONS
from grpo_cli.rollout.vllm.server_engine import ServerEngine
from grpo_cli.rollout.vllm.supervisor import ServerProcess, Serving, vllm_server
from grpo_cli.sharding import whole_shape

LOG_FILE = "vllm-server.log"
_MOST_SEQUENCES = 256
"""Completions that vLLM samples at once; with more it gets hardly any faster."""


def open_colocated(inputs: SamplingInputs, policy: PolicyModel, told: Told) -> ColocateEngine:
    """Start vLLM in this process. With several, all of them do so at once, for parts of an engine too.

    Args:
        inputs: What the run starts from.
        policy: On its device.
        told: Of what the engine does.

    Raises:
        TrainingError: If vLLM is not installed.
        ModelError: If it does not start with this model.
    """
    recipe, dtype = inputs.recipe, sampling_dtype(inputs.recipe, policy)
    told.say(f"starting vLLM {vllm_version()} in {'this' if inputs.processes.count == 1 else 'every'} process")
    return ColocateEngine(
        _arguments(inputs, dtype),
        inputs.tokenizer,
        bucket_bytes=recipe.vllm.weight_bucket_mib << 20,
        dtype=getattr(torch, dtype),
        max_num_seqs=_most_sequences(inputs),
        adapters=_adapters(inputs, policy),
        sleeps=recipe.vllm.enable_sleep_mode,
        on_progress=told.progress,
        on_notice=told.say,
    )


def open_servers(inputs: SamplingInputs, policy: PolicyModel, told: Told, stack: ExitStack) -> RolloutEngine:
    """Connect to the servers; with `vllm.start` start one first, whose end `stack` sees to.

    Args:
        inputs: What the run starts from.
        policy: On its device.
        told: Of what the engine does.
        stack: Ends the started server.

    Raises:
        TrainingError: If a server does not start, cannot be reached, or wants another token.
        ModelError: If it serves another model, or does not take images or sequences as the run has them.
    """
    recipe, dtype = inputs.recipe, sampling_dtype(inputs.recipe, policy)
    section, device = recipe.vllm, inputs.processes.device
    token = read_token(section.token_file, inputs.folder)
    server = None
    if section.start:
        token = token or secrets.token_urlsafe(32)
        server = _start_server(inputs, dtype, token, told, stack)
    addresses = server_addresses(section)
    engine = ServerEngine(
        [
            VllmClient(
                address,
                token,
                connect_timeout=section.connect_timeout,
                request_timeout=section.request_timeout,
            )
            for address in addresses
        ],
        inputs.tokenizer,
        transport=_transport(recipe, [urlsplit(address).hostname or "" for address in addresses], device),
        bucket_bytes=section.weight_bucket_mib << 20,
        dtype=getattr(torch, dtype),
        adapters=_adapters(inputs, policy),
        needs=Needs(
            model=recipe.model.name_or_path,
            sizes=model_sizes(policy.model.config),
            dtype=dtype,
            device=device.type,
            longest=inputs.longest_sequence,
            num_generations=inputs.most_generations,
            image_options=_image_options(inputs),
            most_images=inputs.most_images,
        ),
        server_timeout=section.server_timeout,
        on_progress=told.progress,
        on_notice=told.say,
    )
    try:
        engine.wait_until_ready(section.server_timeout, on_wait=told.say)
    except BaseException:
        engine.close()
        raise
    if server is None:
        return engine
    return StartedServerEngine(engine, server, server_timeout=section.server_timeout, say=told.say)


def _image_options(inputs: SamplingInputs) -> Mapping[str, Any] | None:
    """Give the options of what prepares images; None: no prompt has one."""
    return None if inputs.vision is None else inputs.recipe.model.processor_kwargs


def _start_server(inputs: SamplingInputs, dtype: str, token: str, told: Told, stack: ExitStack) -> ServerProcess:
    """Start a server for this run alone, and wait until it answers."""
    recipe, section = inputs.recipe, inputs.recipe.vllm
    serving = Serving(
        name=recipe.model.name_or_path,
        host=section.server_host,
        port=section.server_port,
        token=token,
        max_num_generations=max(MAX_NUM_GENERATIONS, inputs.most_generations),
        log_path=inputs.output_dir / LOG_FILE,
    )
    told.say(f"starting vLLM {vllm_version()} on {serving.url} (log: {serving.log_path})")
    # It samples nothing before it gets the trainer's weights, so it need not read any.
    arguments = {"load_format": "dummy", "max_num_seqs": _most_sequences(inputs), **_arguments(inputs, dtype)}
    server = stack.enter_context(vllm_server(arguments, serving))
    server.start()
    wait_for(server, section.server_timeout, told.say)
    return server


def _arguments(inputs: SamplingInputs, dtype: str) -> dict[str, Any]:
    """Say what engine to build for this run's model and lengths.

    Raises:
        ModelError: If `vllm.engine` allows fewer images of a prompt than there are.
    """
    recipe = inputs.recipe
    limits = recipe.vllm.engine.get("limit_mm_per_prompt")
    allowed = limits.get("image") if isinstance(limits, Mapping) else None
    if isinstance(allowed, int) and allowed < inputs.most_images:
        raise ModelError(
            f"vllm.engine: limit_mm_per_prompt: found {allowed} for image, but prompts of this run have up to {inputs.most_images}",
            hint="raise it, or leave it out",
        )
    model, tokenizer = recipe.model, recipe.model.tokenizer_name_or_path
    return engine_arguments(
        recipe.vllm,
        model=prepared_location(model.name_or_path, inputs.folder).name_or_path,
        dtype=dtype,
        max_model_len=recipe.vllm.max_model_length or inputs.longest_sequence,
        seed=recipe.train.seed,
        on_cpu=inputs.processes.device.type == "cpu",
        revision=model.revision,
        tokenizer=None if tokenizer is None else prepared_location(tokenizer, inputs.folder).name_or_path,
        trust_remote_code=model.trust_remote_code,
        lora_rank=lora_rank_to_send(recipe.vllm, model.lora, config=load_config(model, inputs.folder)),
        image_options=_image_options(inputs),
        sharing_memory=inputs.processes.sharing_memory if recipe.vllm.mode == "colocate" else None,
    )


def _adapters(inputs: SamplingInputs, policy: PolicyModel) -> Adapters | None:
    """Stream the policy's adapters, if they are to go to vLLM as such."""
    rank = lora_rank_to_send(inputs.recipe.vllm, inputs.recipe.model.lora, config=policy.model.config)
    # Weights that are cut into parts come in one stream, which all processes go through: the merged ones.
    if rank is None or inputs.strategy.spread.weight_parts > 1:
        return None
    weights = DequantizedWeights(policy.model, inputs.strategy.named_weights(policy))
    return Adapters(
        below=checkpoint_names(policy.model, FrozenWeights(weights)),
        adapters=AdapterWeights(policy.model, weights),
        rank=rank,
    )


def _most_sequences(inputs: SamplingInputs) -> int:
    """Count the completions that an engine is asked for at once, as far as sampling them at once pays."""
    engines = count_engines(inputs.recipe.vllm, inputs.processes.count)
    return min(_MOST_SEQUENCES, inputs.most_completions(engines))


def _transport(recipe: Recipe, hosts: list[str], device: torch.device) -> WeightTransport:
    """Choose how weights travel to the servers.

    Raises:
        TrainingError: If that is not possible here, or no way leads to a server.
    """
    section = recipe.vllm
    far = [host for host in hosts if not is_loopback(host)]
    setting = section.weight_transport
    if setting == "auto" and section.start and device.type == "cuda":
        # The server that this run starts is on the GPU that trains, and NCCL refuses two ranks on one device.
        setting = "cuda_ipc"
    return build_transport(
        choose_transport(setting, device=device, same_machine=section.start or not far),
        device=device,
        host=section.group_host or address_towards([*far, *hosts][0]),
        port=section.group_port,
    )


def sampling_dtype(recipe: Recipe, policy: PolicyModel) -> str:
    """Name the precision that vLLM holds its weights and computes in."""
    return resolved_dtype(recipe.vllm, bf16=recipe.train.bf16, model_dtype=dtype_name(policy.model))


def vllm_bytes(inputs: SamplingInputs, policy: PolicyModel) -> int:
    """Estimate what vLLM takes of the memory that this process trains in; nothing if it runs elsewhere, as far as is known."""
    recipe, section = inputs.recipe, inputs.recipe.vllm
    if section.mode == "server" and not section.start:
        return 0
    available = total_memory(inputs.processes.device)
    if inputs.processes.device.type != "cpu":
        return int(section.gpu_memory_utilization * (available or 0))
    dtype = sampling_dtype(recipe, policy)
    itemsize = int(getattr(torch, dtype).itemsize)
    parts = section.tensor_parallel_size if section.mode == "colocate" else 1  # a server's are all on this machine
    weights = itemsize * sum(whole_shape(parameter).numel() for parameter in policy.parameters()) // parts
    cache = int(_arguments(inputs, dtype).get("kv_cache_memory_bytes", 0))
    values = cached_values_per_token(policy.model.config.get_text_config(), parts=parts)
    longest = inputs.longest_sequence
    if section.mode == "colocate" and values is not None and longest is not None:  # it takes no more than can be filled
        cache = min(cache, _most_sequences(inputs) * longest * values * itemsize)
    return weights + cache
