"""`vllm:` the engine that samples, if it is vLLM."""

from dataclasses import dataclass
from typing import Any, Literal

from grpo_cli.recipe.schema.option import option


@dataclass(kw_only=True)
class VllmSection:
    """Where vLLM runs, how it gets the weights, and how far its numbers are trusted. The names are TRL's without `vllm_`."""

    mode: Literal["server", "colocate"] | None = option(
        None,
        help="`server`: one or more `grpo vllm-serve` sample; `colocate`: vLLM inside the training processes; left out: the built-in "
        "engine.",
    )
    start: bool = option(False, help="server: start `grpo vllm-serve` on this machine, and end it with the run.")
    server_host: str = option("127.0.0.1", non_empty=True, help="server: where it listens.")
    server_port: int = option(8000, minimum=1, maximum=65535, help="server: its port.")
    server_base_urls: list[str] = option(
        factory=list,
        help="server: addresses of several servers, such as `http://node7:8000`, that share the prompts; replaces host and port.",
    )
    token_file: str | None = option(
        None,
        help="server: file with the servers' token, for its owner alone; left out: the environment variable GRPO_VLLM_TOKEN, if it is set.",
    )
    server_timeout: float = option(
        600.0, above=0, help="server: seconds to wait for it to be ready, at the start and after it was lost."
    )
    connect_timeout: float = option(10.0, above=0, help="server: seconds to wait for a connection.")
    request_timeout: float = option(
        1800.0, above=0, help="server: seconds to wait for all completions of a prompt, or for a call about weights."
    )
    group_host: str | None = option(
        None,
        help="server: address of this machine under which the servers reach it for new weights; left out: the one that leads to them.",
    )
    group_port: int = option(
        0, minimum=0, maximum=65535, help="server: port for new weights on this machine; 0 takes a free one."
    )
    weight_transport: Literal["auto", "process_group", "shared_memory", "cuda_ipc"] = option(
        "auto",
        help="server: how weights travel. `process_group`: NCCL, or gloo on CPUs; `shared_memory`: CPUs of one machine; `cuda_ipc`: a "
        "server on the very GPUs that train. `auto`: shared memory between CPUs of one machine; `cuda_ipc` for a server that the run "
        "started on its GPU; else the process group.",
    )
    weight_bucket_mib: int = option(256, minimum=1, help="MiB of weights that travel, and are held twice, at once.")
    merge_adapters: bool = option(
        False,
        help="With `model.lora`: send all weights with the adapters merged into them, instead of the adapters alone. It spares sampling "
        "their products, and works where vLLM has no adapters for a layer, but more bytes travel, and in bfloat16 small changes are rounded away.",
    )
    canary_steps: int = option(
        25,
        minimum=0,
        help="Weight updates between two checks that vLLM and the trainer give the same log-probabilities; 0 checks the first only.",
    )
    canary_tolerance: float | None = option(
        None,
        above=0,
        help="Mean difference of log-probabilities at which the run stops; left out: 0.005 if both compute in float32, else 0.1, and after the "
        "first check twenty times what that found, if it is less.",
    )
    importance_sampling_correction: bool = option(
        True, help="Weigh the policy term by the trainer's over vLLM's probabilities, within bounds."
    )
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = option(
        "token_truncate",
        help="A ratio per token or the product over the completion; outside the bounds it is moved to the bound or the policy term is "
        "left out.",
    )
    importance_sampling_clip_max: float | None = option(3.0, above=0, help="Upper bound of the ratio; null for none.")
    importance_sampling_clip_min: float | None = option(
        None, minimum=0, help="Lower bound of the ratio; null for none."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        help="Precision of vLLM's weights and arithmetic; `auto`: bfloat16 with `train.bf16`, else that of the model as it trains.",
    )
    tensor_parallel_size: int = option(
        1,
        minimum=1,
        help="GPUs that one copy of the model is spread over. colocate: as many of the training processes, whose number must be a multiple.",
    )
    data_parallel_size: int = option(1, minimum=1, help="server: copies of the model.")
    max_model_length: int | None = option(
        None, minimum=2, help="Longest prompt and completion together; left out: what this run can need."
    )
    gpu_memory_utilization: float = option(
        0.3,
        above=0,
        maximum=1,
        help="Share of each GPU's memory for vLLM (of main memory on a CPU). `grpo vllm-serve` takes 0.9 if not told.",
    )
    enable_prefix_caching: bool = option(True, help="Keep keys and values of prompts between requests.")
    enable_sleep_mode: bool = option(
        False, help="colocate: give vLLM's memory back while the policy is trained. GPUs only."
    )
    structured_outputs_regex: str | None = option(
        None,
        help="Regular expression that every completion must match. The trainer's log-probabilities know nothing of it; the importance "
        "ratio does.",
    )
    engine: dict[str, Any] = option(
        factory=dict,
        help="Further arguments of vLLM's engine by their names there, such as `{max_num_batched_tokens: 8192}`.",
    )
