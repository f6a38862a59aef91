"""What `grpo vllm-serve` serves: a recipe's model and settings, with the options over them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import ModelError, Problem, RecipeError

if TYPE_CHECKING:
    from grpo_cli.recipe.load import LoadedRecipe
    from grpo_cli.recipe.schema import ModelSection, VllmSection

_SERVER_MEMORY = 0.9
"""Share of a GPU unless told otherwise: nothing trains there, as far as one can tell."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServePlan:
    """What is served: the recipe's, with the options over it.

    Attributes:
        model: Whose weights the server begins with.
        vllm: How it computes.
        dtype: Its precision; None: float32 on a CPU, else the checkpoint's.
        seed: Of samples without a seed.
        num_generations: Completions of a prompt that the recipe wants at most, in training and in evaluation.
        lora_rank: Of the adapters that the recipe sends; None: it sends whole weights.
        folder: What relative paths start from.
        where: Place of `vllm.engine`, for errors.
    """

    model: "ModelSection"
    vllm: "VllmSection"
    dtype: str | None
    seed: int
    num_generations: int
    lora_rank: int | None
    folder: Path
    where: str


def serve_plan(
    recipe: Path | None, overrides: Sequence[str], model: str | None, given: dict[str, Any], engine: Sequence[str]
) -> ServePlan:
    """Lay the options over the recipe, or over the defaults.

    Args:
        recipe: The recipe's file, if there is one.
        overrides: Changes to it.
        model: Name of another model, with a tokenizer of its own.
        given: Keys of `vllm:` that have an option; None: it was not given.
        engine: `KEY=VALUE` of each further argument of vLLM's engine.

    Raises:
        RecipeError: If the recipe is wrong, or neither it nor a model is given.
    """
    from grpo_cli.recipe.schema import ModelSection, VllmSection

    further = _further_arguments(engine)
    given = {key: value for key, value in given.items() if value is not None}
    if recipe is None:
        if model is None:
            raise wrong_option("--model", "is missing", "grpo vllm-serve --model MODEL, or grpo vllm-serve RECIPE")
        vllm = dataclasses.replace(VllmSection(gpu_memory_utilization=_SERVER_MEMORY, engine=further), **given)
        return ServePlan(
            model=ModelSection(name_or_path=model),
            vllm=vllm,
            dtype=None if vllm.dtype == "auto" else vllm.dtype,
            seed=0,
            num_generations=1,
            lora_rank=None,
            folder=Path.cwd(),
            where="command line",
        )
    from grpo_cli.engine.continued import with_adapter_settings  # transformers, which takes seconds
    from grpo_cli.recipe.load import load_recipe

    # Data and rewards are not needed here; model and token are looked for before vLLM starts.
    loaded = with_adapter_settings(load_recipe(recipe, overrides, look_for_files=False))
    section = loaded.recipe.model
    if model is not None:
        section = dataclasses.replace(section, name_or_path=model, revision=None, tokenizer_name_or_path=None)
    return _plan_of_recipe(loaded, section, given, further)


def _plan_of_recipe(
    loaded: "LoadedRecipe", model: "ModelSection", given: dict[str, Any], further: dict[str, Any]
) -> ServePlan:
    from grpo_cli.policy.load import load_config
    from grpo_cli.recipe.eval_tasks import evaluation_tasks
    from grpo_cli.recipe.vllm_rules import longest_allowed
    from grpo_cli.rollout.vllm.arguments import lora_rank_to_send, resolved_dtype

    recipe = loaded.recipe
    defaults: dict[str, Any] = {"max_model_length": recipe.vllm.max_model_length or longest_allowed(recipe)}
    if "vllm.gpu_memory_utilization" not in loaded.chosen:
        defaults["gpu_memory_utilization"] = _SERVER_MEMORY
    vllm = dataclasses.replace(
        recipe.vllm,
        **(defaults | given),
        enable_sleep_mode=False,
        engine=recipe.vllm.engine | further,
    )
    lora = recipe.model.lora
    rank = None if lora is None else lora_rank_to_send(vllm, lora, config=load_config(model, loaded.folder))
    evaluated = [task.settings.num_generations for task in evaluation_tasks(recipe)]
    return ServePlan(
        model=model,
        vllm=vllm,
        dtype=resolved_dtype(vllm, bf16=recipe.train.bf16, model_dtype=model.dtype),
        seed=recipe.train.seed,
        num_generations=max([recipe.grpo.num_generations, *evaluated]),
        lora_rank=rank,
        folder=loaded.folder,
        where="command line" if further else str(loaded.path),
    )


def _further_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Read `--engine KEY=VALUE`; values are YAML, as in recipes."""
    import yaml

    arguments = {}
    for word in words:
        key, equals, text = word.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            equals = ""
        if not key or not equals:
            raise wrong_option("--engine", f"found {word!r}; allowed: KEY=VALUE", "such as --engine max_num_seqs=512")
        arguments[key.replace("-", "_")] = value
    return arguments


def wrong_option(option: str, message: str, hint: str | None) -> RecipeError:
    """Make the error of one option: what was found and what is allowed, and the likely fix."""
    return RecipeError([Problem(where="command line", key=option, message=message, hint=hint)])


def prepared_model(model: "ModelSection", folder: Path) -> str:
    """Give a hub id or a plain folder, which vLLM can load, and see that it is there before vLLM is started.

    Raises:
        ModelError: If it is not there.
    """
    from grpo_cli.policy.locate import locate_model

    location = locate_model(model.name_or_path, folder)
    if location.gguf_file is not None:
        from grpo_cli.policy.load import prepared_location

        return prepared_location(model.name_or_path, folder).name_or_path
    path = Path(location.name_or_path)
    if not path.is_dir():
        _ask_hub(model)
    elif not (path / "config.json").is_file():
        raise ModelError(
            f"model.name_or_path: {path} has no config.json", hint="name the folder that `save_pretrained` wrote"
        )
    return location.name_or_path


def prepared_tokenizer(model: "ModelSection", folder: Path) -> str | None:
    """Give the hub id or the plain folder of a tokenizer that is not the model's own.

    Raises:
        ModelError: If it is not there.
    """
    if model.tokenizer_name_or_path is None:
        return None
    from grpo_cli.policy.load import prepared_location

    return prepared_location(model.tokenizer_name_or_path, folder).name_or_path


def _ask_hub(model: "ModelSection") -> None:
    """See that a hub model is there, by its smallest file: vLLM takes half a minute to say that it is not."""
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(model.name_or_path, "config.json", revision=model.revision)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"model.name_or_path: {model.name_or_path} is no folder and cannot be had from the hub: {reason}",
            hint="check the name; gated models need `hf auth login`",
        ) from None
