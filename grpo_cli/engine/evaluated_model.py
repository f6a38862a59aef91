"""Which model `--model` means, and how it is loaded with a recipe that names another one."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_cli.engine.checkpoint_store import CheckpointStore
from grpo_cli.engine.continued import begun_folder, with_adapter_settings
from grpo_cli.engine.model_folder import model_folder
from grpo_cli.errors import ModelError
from grpo_cli.policy.adapter_settings import CONFIG_FILE, read_adapter_settings
from grpo_cli.policy.locate import locate_model, with_weights_in
from grpo_cli.policy.quantization import with_quantization
from grpo_cli.policy.weights_below import other_base
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import ModelSection, Recipe
from grpo_cli.recipe.suggest import did_you_mean

_SHORT_NAME = re.compile(r"final|best|step-\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedModel:
    """A model to evaluate.

    Attributes:
        label: Names it in tables and folders.
        name: What was found: a folder, or a name of the hub.
        section: What is loaded.
        adapters: Folder of the adapters that come on top of it; None: none do.
    """

    label: str
    name: str
    section: ModelSection
    adapters: Path | None


def evaluated_models(given: Sequence[str], loaded: LoadedRecipe) -> list[EvaluatedModel]:
    """Find the models that `--model` names; the recipe's if it is not given: where its training starts.

    Args:
        given: Run directories, checkpoints, folders of models or adapters, GGUF files, `package://module/file` or hub ids; `final`, `best`
            or the name of a checkpoint means that of the recipe's own run.
        loaded: The recipe whose settings they are loaded with.

    Raises:
        ModelError: If a path or a model of the run does not exist, a model is given twice, or adapters are of a kind that is not known here.
        CheckpointError: If a folder holds no model.
    """
    # Nothing is trained, so nothing has to be kept as it is; another model may not even have such parts.
    recipe = replace(loaded.recipe, model=replace(loaded.recipe.model, freeze=[]))
    loaded = replace(loaded, recipe=recipe)
    found = [_found(name, recipe) for name in given] or [_of_recipe(loaded)]
    names = [model.name for model in found]
    for name, twice in zip(names, given, strict=False):
        if names.count(name) > 1:
            raise ModelError(f"--model: {twice} is given twice; allowed: once", hint=f"it is {name}")
    counts = Counter(model.label for model in found)
    return [
        model
        if counts[model.label] == 1
        else replace(model, label=f"{model.label}-{hashlib.sha256(model.name.encode()).hexdigest()[:6]}")
        for model in found
    ]


def _of_recipe(loaded: LoadedRecipe) -> EvaluatedModel:
    """Find the recipe's model, with the adapters that it goes on from; new ones change nothing, and are left out."""
    model = loaded.recipe.model
    begun = None if model.lora is None else model.lora.adapter_name_or_path
    if begun is None:
        name = model.name_or_path
        return EvaluatedModel(label=_label(name), name=name, section=replace(model, lora=None), adapters=None)
    folder = begun_folder(begun, loaded.folder)
    return EvaluatedModel(
        label=_label_of_folder(folder) if (loaded.folder / begun).exists() else _label(begun),
        name=str(folder),
        section=with_adapter_settings(loaded).recipe.model,
        adapters=folder,
    )


def _found(given: str, recipe: Recipe) -> EvaluatedModel:
    path = _local(given, Path(recipe.train.output_dir).expanduser())
    if path is None:
        return EvaluatedModel(
            label=_label(given),
            name=given,
            section=replace(
                with_weights_in(recipe.model, given), tokenizer_name_or_path=None, lora=None, quantization=None
            ),
            adapters=None,
        )
    folder = model_folder(path, prefers_best=True).resolve() if path.is_dir() else path.resolve()
    own = recipe.model.tokenizer_name_or_path or recipe.model.name_or_path
    tokenizer = str(folder) if (folder / "tokenizer_config.json").is_file() else own
    section = replace(
        with_weights_in(recipe.model, folder),
        tokenizer_name_or_path=None if folder.suffix == ".gguf" else tokenizer,
        lora=None,
        quantization=None,
    )
    adapters = folder / CONFIG_FILE
    if adapters.is_file():
        section = _with_adapters(section, folder)
    return EvaluatedModel(
        label=_label_of_folder(folder),
        name=str(folder),
        section=section,
        adapters=folder if adapters.is_file() else None,
    )


def _local(given: str, output_dir: Path) -> Path | None:
    """Find what lies on this machine; None: it can only be a name of the hub, or of a package's resource.

    Raises:
        ModelError: If it is a path, or a short name, of something that is not there.
    """
    path = Path(given).expanduser()
    if path.exists():
        return path
    own = _of_run(given, output_dir)
    if own is not None:
        return own
    is_path = given.startswith((".", "/", "~")) or given.count("/") > 1 or given.endswith(".gguf")
    if "://" in given or not is_path:
        return None
    neighbours = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise ModelError(
        f"--model: {given} does not exist",
        hint=did_you_mean(path.name, neighbours)
        or "name a run directory, a checkpoint, a folder with config.json, or a hub id such as Qwen/Qwen2-0.5B-Instruct",
    )


def _of_run(given: str, output_dir: Path) -> Path | None:
    """Find a model of the recipe's own run by its short name; None: it is no such name.

    Raises:
        ModelError: If the run has no model of that name.
    """
    if _SHORT_NAME.fullmatch(given) is None:
        return None
    store = CheckpointStore(output_dir / "checkpoints", keep=1)
    places = {"final": output_dir / "final"}
    if store.best is not None:
        places["best"] = store.path(store.best.step)
    places |= {store.path(step).name: store.path(step) for step in store.steps()}
    there = {name: place for name, place in places.items() if place.is_dir()}
    if given not in there:
        raise ModelError(
            f"--model: {given} does not exist in {output_dir}; allowed: {', '.join(there) or 'nothing, for it has no model yet'}",
            hint=did_you_mean(given, list(there)) or "train.output_dir says which run is meant",
        )
    return there[given]


def _with_adapters(section: ModelSection, folder: Path) -> ModelSection:
    """Say how the model below is loaded, and how adapters are put on it."""
    found = read_adapter_settings(folder, key="--model")
    if found.base is None:
        raise ModelError(
            f"--model: {folder} holds adapters, and does not say of which model",
            hint="merge them with `grpo export --merge --base MODEL`, and evaluate that",
        )
    section = replace(section, name_or_path=found.base, revision=found.revision, lora=found.lora)
    try:
        locate_model(found.base, Path.cwd())
    except ModelError as error:
        raise ModelError(
            f"--model: {folder} holds adapters that were trained on {found.base}, which is not there any more",
            hint="`grpo export --merge --base MODEL` names it where it is now; evaluate what that writes",
        ) from error
    other_base(folder, section, Path.cwd(), key="--model")
    return with_quantization(section, folder)


def _label(name: str) -> str:
    """Name a model of the hub, or of a package, by what a folder can be called."""
    if "://" in name or name.startswith((".", "/", "~")):
        name = name.rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def _label_of_folder(folder: Path) -> str:
    """Name a model by its folder, and one of a run by the run's name too."""
    checkpoint = folder.parent if folder.name == "model" else folder
    if checkpoint.name.startswith("step-"):
        return _label(f"{checkpoint.parent.parent.name}-{checkpoint.name}")
    return _label(f"{folder.parent.name}-final" if folder.name == "final" else folder.name)
