"""Load the policy and its tokenizer, and turn what may go wrong into one line."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils.peft_utils import find_adapter_config_file

from grpo_cli.errors import CheckpointError, ModelError
from grpo_cli.onednn import speed_up_linears
from grpo_cli.policy.adapter_settings import adapters_folder, read_adapter_settings
from grpo_cli.policy.adapters import attach_adapters, check_adapters, keep_as_reference, load_adapters
from grpo_cli.policy.locate import ModelLocation, converted_folder, locate_model
from grpo_cli.policy.parts import freeze
from grpo_cli.policy.quantization import check_whole, compute_with_rounded_weights, let_go_of_files, quantization_config
from grpo_cli.recipe.kinds import show
from grpo_cli.recipe.schema import ModelSection
from grpo_cli.vision.inputs import is_vision_language

DROPOUT_NAME = re.compile(r"dropout|drop_rate|drop_prob|drop_path|layerdrop|pdrop|jitter")
"""Attributes that hold a probability of dropping, or the width of a router's noise, in some model family."""


def load_model(
    section: ModelSection,
    *,
    folder: Path,
    device: torch.device | str = "cpu",
    adapters: Path | None = None,
    begun: Path | None = None,
    keeps_reference: bool = False,
) -> Any:
    """Load the causal or vision-language model that a recipe names, with adapters if it asks for them.

    Attention with bounded scores is eager where `sdpa` is asked for (see `caps_attention`). Dropout is switched off (see
    `disable_dropout`); the model is in training mode, which gradient checkpointing needs; it can be saved (see
    `repair_generation_config`).

    Args:
        section: The recipe's `model:`.
        folder: The recipe's folder, which relative paths start from.
        device: Where the model goes; on `meta` it has no weights, and nothing of them is read.
        adapters: Folder of trained adapters; None: those that the recipe goes on from, or new ones.
        begun: Folder of those that the recipe goes on from; None: it is where the recipe says.
        keeps_reference: Whether those that the recipe goes on from are kept beside them (see `keep_as_reference`).

    Returns:
        A transformers model, weights in `section.dtype`.

    Raises:
        ModelError: If it is not found, is no language model, has no part that is to be frozen, does not load, or does not fit into the device's memory.
        CheckpointError: If the trained adapters are not there, or others than the recipe asks for.
    """
    model = _read(section, folder, device)
    if section.attn_implementation == "sdpa" and caps_attention(model.config):
        model.set_attn_implementation("eager")
    frozen = freeze(model, section.freeze)
    if section.lora is not None:
        attach_adapters(model, section.lora, frozen=frozen, revision=section.revision)
        name = section.lora.adapter_name_or_path
        if name is not None and (adapters is None or keeps_reference):
            load_begun(model, begun or adapters_folder(name, folder))
        if keeps_reference:
            keep_as_reference(model)
        if adapters is not None:
            _load_adapters(model, adapters)
    disable_dropout(model)
    repair_generation_config(model)
    compute_with_rounded_weights(model, section)
    speed_up_linears(model)
    return model.train()


def _read(section: ModelSection, folder: Path, device: torch.device | str) -> Any:
    """Read a model's weights, and refuse what cannot be trained. See `load_model`."""
    location = prepared_location(section.name_or_path, folder)
    with explained(section.name_or_path):
        make = _from_weights if section.random_weights_seed is None else _from_nothing
        model = make(section, location, torch.device(device))
    if model.dtype == torch.float16:  # with dtype `auto`; by name the recipe refuses it
        raise ModelError(
            f"model.dtype: {section.name_or_path} has float16 weights, whose gradients underflow in training",
            hint="set model.dtype to float32 (with train.bf16 to compute in bfloat16) or to bfloat16",
        )
    return model


def load_begun(model: Any, folder: Path) -> None:
    """Load the adapters that a recipe goes on from.

    Args:
        model: With adapters; of one on `meta` names and sizes are compared alone.
        folder: Of those adapters.

    Raises:
        ModelError: If they do not fit.
    """
    try:
        _load_adapters(model, folder)
    except CheckpointError as error:
        raise ModelError(
            f"model.lora.adapter_name_or_path: {error.message}",
            hint=f"they belong on a model like {read_adapter_settings(folder).base}; where the head is the embedding, both are trained as one",
        ) from error


def _load_adapters(model: Any, folder: Path) -> None:
    """Load adapters into a model, or see that they fit one that has no weights."""
    (check_adapters if model.device.type == "meta" else load_adapters)(model, folder)


def load_shapes(section: ModelSection, *, folder: Path) -> Any:
    """Make the model that a recipe names without its weights, from its configuration alone.

    Args:
        section: The recipe's `model:`. Its adapters are left out.
        folder: The recipe's folder, which relative paths start from.

    Returns:
        A transformers model on `meta`, in the precision that its weights will have.

    Raises:
        ModelError: If the configuration is not found, or is none of a causal language model.
    """
    config = load_config(section, folder)
    with explained(section.name_or_path), torch.device("meta"):
        model = model_class(config).from_config(config, trust_remote_code=section.trust_remote_code)
    return model.to(_weights_dtype(section, config))


def weights_dtype(section: ModelSection, *, folder: Path) -> torch.dtype:
    """Tell in which precision a recipe's model will have its weights, from its configuration alone.

    Raises:
        ModelError: If the configuration is not found.
    """
    return _weights_dtype(section, load_config(section, folder))


def _from_weights(section: ModelSection, location: ModelLocation, device: torch.device) -> Any:
    """Load a model with its weights."""
    quantization = quantization_config(section)
    # A key that is None would count for more than what the checkpoint says, so it is left out.
    rounded = {} if quantization is None else {"quantization_config": quantization}
    model = model_class(_config_at(section, location)).from_pretrained(
        location.name_or_path,
        revision=section.revision,
        dtype="auto" if section.dtype == "auto" else getattr(torch, section.dtype),
        attn_implementation=section.attn_implementation,
        trust_remote_code=section.trust_remote_code,
        # What is quantized is put on its device while it is loaded.
        device_map=str(device) if quantization is not None or device.type == "meta" else None,
        **rounded,
    )
    if quantization is None:
        return model.to(device)
    let_go_of_files(model)
    return model


def _from_nothing(section: ModelSection, location: ModelLocation, device: torch.device) -> Any:
    """Make a model of its configuration, with weights as its architecture starts them; the caller's random state is left alone."""
    assert section.random_weights_seed is not None
    config = _config_at(section, location)
    with torch.random.fork_rng(devices=[]), torch.device("meta") if device.type == "meta" else nullcontext():
        torch.default_generator.manual_seed(section.random_weights_seed)
        model = model_class(config).from_config(
            config,
            dtype=_weights_dtype(section, config),
            attn_implementation=section.attn_implementation,
            trust_remote_code=section.trust_remote_code,
        )
    return model.to(device)


def model_class(config: Any) -> Any:
    """Give what loads a model of a configuration: a causal or a vision-language one."""
    return AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM


def _config_at(section: ModelSection, location: ModelLocation) -> Any:
    """Load the configuration of a model, and refuse what is none that can be trained."""
    name = section.name_or_path
    if find_adapter_config_file(location.name_or_path, revision=section.revision) is not None:
        raise ModelError(
            f"model.name_or_path: {name} holds adapters (model.lora), and is no whole model",
            hint="name the model that they were trained on, and them as model.lora.adapter_name_or_path to go on from them; `grpo export "
            "--merge` makes a whole model of both; a run that trained them goes on with --resume",
        )
    config = AutoConfig.from_pretrained(
        location.name_or_path, revision=section.revision, trust_remote_code=section.trust_remote_code
    )
    check_whole(config, name)
    if section.processor_kwargs and not is_vision_language(config):
        raise ModelError(
            f"model.processor_kwargs: found {show(section.processor_kwargs)}, but {name} reads text only and has no processor of images",
            hint="leave it out, or name a vision-language model in model.name_or_path",
        )
    return config


def load_config(section: ModelSection, folder: Path) -> Any:
    """Load the configuration of a recipe's model.

    Raises:
        ModelError: If it is not found, holds adapters or quantized weights, or the recipe has options for images, of which it reads none.
    """
    location = prepared_location(section.name_or_path, folder)
    with explained(section.name_or_path):
        return _config_at(section, location)


def _weights_dtype(section: ModelSection, config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None) if section.dtype == "auto" else getattr(torch, section.dtype)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def caps_attention(config: Any) -> bool:
    """Tell whether a model bounds its attention scores (Gemma 2): scaled-dot-product attention would silently leave that out."""
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


def load_tokenizer(section: ModelSection, *, folder: Path) -> Any:
    """Load the tokenizer, with the recipe's chat template if it brings one.

    `model.revision` counts only for a tokenizer that comes with the model: another repository has revisions of its own.

    Raises:
        ModelError: If the tokenizer or the template is not found.
    """
    name = section.tokenizer_name_or_path or section.name_or_path
    revision = section.revision if name == section.name_or_path else None
    location = prepared_location(name, folder)
    with explained(name):
        tokenizer = AutoTokenizer.from_pretrained(
            location.name_or_path, revision=revision, trust_remote_code=section.trust_remote_code
        )
    if section.chat_template_path is not None:
        tokenizer.chat_template = read_chat_template(section.chat_template_path, folder)
    return tokenizer


def read_chat_template(path: str, folder: Path) -> str:
    """Read the recipe's chat template."""
    places = [base / Path(path).expanduser() for base in (folder, Path.cwd())]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ModelError(f"model.chat_template_path: {places[0]} does not exist")
    return found.read_text(encoding="utf-8")


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, PEFT's included (adapters have another, see `adapter_dropout`), and with it layer skipping and
    router noise.

    With dropout the log-probability of a token depends on which call computed it, and the importance ratio of an unchanged
    policy would not be 1. Some families keep the probability as a number on a module and call `F.dropout`, some read it from
    their configuration in the forward; so these become 0 as well.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001  the only common base of torch's dropouts
            module.p = 0.0
        _zero_dropout_numbers(module)
        for holder in vars(module).values():
            if isinstance(holder, PreTrainedConfig):
                _zero_dropout_numbers(holder)


def _zero_dropout_numbers(holder: object) -> None:
    """Set the attributes that are probabilities of dropping to 0, each in its own type."""
    for name, value in list(vars(holder).items()):
        # Switches such as `use_dropout` are bools, and a bool is an int.
        if DROPOUT_NAME.search(name) and type(value) in (int, float) and 0 < value <= 1:
            setattr(holder, name, type(value)(0))


def repair_generation_config(model: Any) -> None:
    """Make the generation configuration one that can be saved.

    Transformers loads some that it refuses to save, and the first to notice would be the first checkpoint. Sampling flags
    without `do_sample` (the usual case) get it; of a configuration that is unsound in another way only the token ids stay.
    This run samples as its recipe says, whatever stands there.
    """
    config = getattr(model, "generation_config", None)
    if config is None or _can_be_saved(config):
        return
    if isinstance(config.pad_token_id, int) and config.pad_token_id < 0:
        config.pad_token_id = None
    if _can_be_saved(config):
        return
    config.do_sample = True
    if not _can_be_saved(config):
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        model.generation_config = GenerationConfig(**{name: getattr(config, name) for name in names})


def _can_be_saved(config: GenerationConfig) -> bool:
    """Ask the check that saving makes."""
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def prepared_location(name_or_path: str, folder: Path) -> ModelLocation:
    """Locate a model and, if it is a GGUF file, convert it to a plain folder in the cache first."""
    location = locate_model(name_or_path, folder)
    if location.gguf_file is None:
        return location
    target = converted_folder(location)
    if not (target / "config.json").is_file():
        with explained(name_or_path):
            _convert_gguf(location, target)
    return ModelLocation(name_or_path=str(target))


def _convert_gguf(location: ModelLocation, target: Path) -> None:
    """Dequantize a GGUF file into a float32 folder of safetensors, complete or not there at all."""
    loaded = AutoModelForCausalLM.from_pretrained(
        location.name_or_path, gguf_file=location.gguf_file, dtype=torch.float32
    )
    config = AutoConfig.from_pretrained(location.name_or_path, gguf_file=location.gguf_file)
    # The loaded model still claims to be quantized and refuses to be saved; a fresh one of the same shape does not.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    repair_generation_config(model)
    tokenizer = AutoTokenizer.from_pretrained(location.name_or_path, gguf_file=location.gguf_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        try:
            beside.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was faster: use its folder
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn what transformers raises into one line that names the recipe key."""
    try:
        yield
    except ModelError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(
            f"model.name_or_path: {name} does not fit into memory", hint="try model.dtype: bfloat16"
        ) from error
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # A wrong config.json is told in two lines: which check failed, and why.
        reason = " ".join(line.strip() for line in lines[: 2 if isinstance(error, StrictDataclassError) else 1])
        offline = " (offline)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise ModelError(
            f"model.name_or_path: cannot load {name}{offline}: {reason}",
            hint="a hub id such as Qwen/Qwen2-0.5B-Instruct, a local folder, a .gguf file or package://module/file; "
            "gated models need `hf auth login`",
        ) from error
