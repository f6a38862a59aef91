"""`grpo vllm-serve`: a vLLM server that training can sample from and push weights to."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from grpo_cli.cli.check import OverridesArgument
from grpo_cli.cli.serve_plan import ServePlan, prepared_model, prepared_tokenizer, serve_plan, wrong_option
from grpo_cli.rollout.vllm.limits import MAX_BODY_MIB, MAX_NUM_GENERATIONS

if TYPE_CHECKING:
    from grpo_cli.rollout.vllm.supervisor import Serving


def _finite(value: float | None) -> float | None:
    """Refuse what is a number to Python alone; no bound keeps nan out."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"found {value}; allowed: a finite number")
    return value


RecipeArgument = Annotated[
    Path | None,
    typer.Argument(
        help="Recipe that gives model, dtype and `vllm:`; options win.", metavar="RECIPE", show_default=False
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Hub id, folder, GGUF file or package://module/file.", show_default=False)
]
Host = Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]", show_default=False)]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Its port. [default: 8000]", show_default=False)]
TokenFile = Annotated[
    str | None,
    typer.Option(
        help="File with the token that requests must bear, if not GRPO_VLLM_TOKEN; for its owner alone (chmod 600).",
        show_default=False,
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option(help="Precision. [default: as the recipe trains; float32 on a CPU]", show_default=False),
]
MaxModelLength = Annotated[
    int | None,
    typer.Option(min=2, help="Longest prompt and completion together. [default: what fits]", show_default=False),
]
TensorParallelSize = Annotated[
    int | None, typer.Option(min=1, help="GPUs for one copy of the model.", show_default=False)
]
DataParallelSize = Annotated[int | None, typer.Option(min=1, help="Copies of the model.", show_default=False)]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1,
        callback=_finite,
        help="Share of each GPU's memory. [default: 0.9, or what the recipe says]",
        show_default=False,
    ),
]
EnablePrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep keys and values of prompts.",
        show_default=False,
    ),
]
ServerTimeout = Annotated[
    float | None,
    typer.Option(min=1, callback=_finite, help="Seconds to be ready in. [default: 600]", show_default=False),
]
MaxBodyMib = Annotated[int, typer.Option(min=1, help="Largest request, in MiB; images are a third longer in it.")]
MaxNumGenerations = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Largest n of a request. [default: {MAX_NUM_GENERATIONS}, or the recipe's if that is more]",
        show_default=False,
    ),
]
LogFile = Annotated[
    Path | None, typer.Option(help="File for vLLM's output. [default: vllm-server-PORT.log]", show_default=False)
]
Engine = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Any argument of vLLM's engine; can be repeated.", show_default=False),
]


def vllm_serve(
    recipe: RecipeArgument = None,
    overrides: OverridesArgument = None,
    *,
    model: Model = None,
    host: Host = None,
    port: Port = None,
    token_file: TokenFile = None,
    dtype: Dtype = None,
    max_model_length: MaxModelLength = None,
    tensor_parallel_size: TensorParallelSize = None,
    data_parallel_size: DataParallelSize = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    enable_prefix_caching: EnablePrefixCaching = None,
    server_timeout: ServerTimeout = None,
    max_body_mib: MaxBodyMib = MAX_BODY_MIB,
    max_num_generations: MaxNumGenerations = None,
    log_file: LogFile = None,
    engine: Engine = None,
) -> None:
    """Serve a model with vLLM for training elsewhere: completions as token ids, after images too, and new weights after every step.

    It listens on this machine alone. Another address wants a token; it covers every route but /health. Without one, all users of
    this machine can sample and change the weights: on a shared machine, set it. Token and weights travel in plain text.

    Exit codes: 2 wrong options, recipe or model; 4 vLLM cannot start, or ended; 130 Ctrl-C; 143 SIGTERM.

    \b
    Examples:
      grpo vllm-serve --model Qwen/Qwen2.5-0.5B-Instruct
      grpo vllm-serve recipes/tldr.yaml --tensor-parallel-size 2
      grpo vllm-serve recipes/tldr.yaml --host 0.0.0.0 --token-file token --engine max_num_seqs=512
    """  # noqa: D301  \b keeps the lines apart
    given = {
        "server_host": host,
        "server_port": port,
        "token_file": token_file,
        "dtype": dtype,
        "max_model_length": max_model_length,
        "tensor_parallel_size": tensor_parallel_size,
        "data_parallel_size": data_parallel_size,
        "gpu_memory_utilization": gpu_memory_utilization,
        "enable_prefix_caching": enable_prefix_caching,
        "server_timeout": server_timeout,
    }
    plan = serve_plan(recipe, overrides or [], model, given, engine or [])
    serving = _serving(
        plan,
        token=_token(plan, recipe, token_file),
        max_body_mib=max_body_mib,
        max_num_generations=max_num_generations or max(MAX_NUM_GENERATIONS, plan.num_generations),
        log_file=log_file or Path(f"vllm-server-{plan.vllm.server_port}.log"),
    )
    _serve(plan, serving)


def _token(plan: ServePlan, recipe: Path | None, token_file: str | None) -> str | None:
    """Read the token, and say where a wrong file was named."""
    from grpo_cli.rollout.vllm.arguments import read_token

    if token_file is not None:
        return read_token(token_file, Path.cwd(), where="command line", key="--token-file")
    return read_token(plan.vllm.token_file, plan.folder, where=str(recipe))


def _check_host(host: str, token: str | None) -> None:
    """Refuse what is no address, and to serve other machines without a token."""
    from grpo_cli.recipe.addresses import NEW_TOKEN, is_host, is_loopback

    if not is_host(host):
        raise wrong_option(
            "--host",
            f'found "{host}"; allowed: a host name or an address, with nothing around it',
            "the port goes into --port",
        )
    if token is None and not is_loopback(host):
        raise wrong_option(
            "--host",
            f"{host} can be reached from other machines, so a token is needed",
            f"{NEW_TOKEN}, and --token-file token here and vllm.token_file in the recipe",
        )


def _serving(
    plan: ServePlan, *, token: str | None, max_body_mib: int, max_num_generations: int, log_file: Path
) -> "Serving":
    """Say how the server is reached, and refuse what cannot be, before anything large is loaded."""
    from grpo_cli.rollout.vllm.supervisor import Serving, refuse_taken_port

    host, port = plan.vllm.server_host, plan.vllm.server_port
    _check_host(host, token)
    refuse_taken_port(host, port)
    return Serving(
        name=plan.model.name_or_path,
        host=host,
        port=port,
        token=token,
        max_body_mib=max_body_mib,
        max_num_generations=max_num_generations,
        log_path=log_file.resolve(),
    )


def _serve(plan: ServePlan, serving: "Serving") -> None:
    """Start vLLM and stay until it ends or a signal comes."""
    from grpo_cli.engine.signals import StopSignals
    from grpo_cli.rollout.vllm.arguments import vllm_version
    from grpo_cli.rollout.vllm.supervisor import vllm_server

    version = vllm_version()
    arguments = served_engine(plan)
    with StopSignals() as signals, vllm_server(arguments, serving) as server, signals.interruptible():
        server.start()
        typer.echo(f"starting vLLM {version} for {serving.name} on {serving.url} (log: {serving.log_path})")
        took = server.wait_until_ready(
            plan.vllm.server_timeout, lambda stage, seconds: typer.echo(f"{stage}, {seconds:.0f} s")
        )
        typer.echo(f"ready: {serving.url} ({took:.0f} s); Ctrl-C ends it")
        server.watch()


def served_engine(plan: ServePlan) -> dict[str, Any]:
    """Give the arguments of vLLM's engine. Where a model sees, it can be given images: whether prompts have some shows only in the data.

    Raises:
        ModelError: If the model or its tokenizer is not there.
        RecipeError: If `vllm.engine` holds something that it cannot.
    """
    from grpo_cli.rollout.vllm.arguments import engine_arguments

    model, on_cpu = prepared_model(plan.model, plan.folder), not _sees_gpu()
    return engine_arguments(
        plan.vllm,
        model=model,
        dtype=plan.dtype or ("float32" if on_cpu else "auto"),
        max_model_len=plan.vllm.max_model_length,
        seed=plan.seed,
        on_cpu=on_cpu,
        revision=plan.model.revision,
        tokenizer=prepared_tokenizer(plan.model, plan.folder),
        trust_remote_code=plan.model.trust_remote_code,
        lora_rank=plan.lora_rank,
        image_options=plan.model.processor_kwargs if _sees(plan, model) else None,
        where=plan.where,
    )


def _sees(plan: ServePlan, model: str) -> bool:
    """Tell whether the model reads images, and refuse options for them if it does not.

    Who asks its configuration waits seconds for transformers, unless there is nothing to refuse and the file says that it reads none.
    """
    file = Path(model) / "config.json"
    has_options = bool(plan.model.processor_kwargs)
    if not has_options and file.is_file() and "vision_config" not in json.loads(file.read_text(encoding="utf-8")):
        return False
    from grpo_cli.policy.load import load_config
    from grpo_cli.vision.inputs import is_vision_language

    return is_vision_language(load_config(plan.model, plan.folder))


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
