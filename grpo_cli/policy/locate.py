"""Where a model named in a recipe lives: the hub, a folder, a GGUF file or a resource of an installed package."""

import hashlib
import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_cli.errors import ModelError
from grpo_cli.hub import stay_offline_without_network
from grpo_cli.recipe.imports import PACKAGE_PREFIX
from grpo_cli.recipe.schema import ModelSection


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLocation:
    """What `from_pretrained` is given.

    Attributes:
        name_or_path: Hub id, or an existing folder.
        gguf_file: File name inside that folder, if the weights are in a GGUF file.
    """

    name_or_path: str
    gguf_file: str | None = None


def locate_model(name_or_path: str, folder: Path) -> ModelLocation:
    """Resolve a recipe's model name.

    Args:
        name_or_path: Hub id, path (from `folder`, then from the working folder) or `package://module/file`.
        folder: The recipe's folder.

    Raises:
        ModelError: If a package or its file is not there, or a path that cannot be a hub id does not exist.
    """
    if name_or_path.startswith(PACKAGE_PREFIX):
        return _at_path(_package_resource(name_or_path))
    for base in (folder, Path.cwd()):
        candidate = (base / Path(name_or_path).expanduser()).resolve()
        if candidate.exists():
            return _at_path(candidate)
    looks_like_a_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if looks_like_a_path or name_or_path.endswith(".gguf"):
        raise ModelError(
            f"model.name_or_path: {name_or_path} does not exist",
            hint=paths_hint(folder),
        )
    stay_offline_without_network()
    return ModelLocation(name_or_path=name_or_path)


def paths_hint(folder: Path) -> str:
    """Say where relative paths of a recipe start from.

    Args:
        folder: The recipe's.
    """
    places = dict.fromkeys((folder, Path.cwd()))
    return f"paths are taken from {' and from '.join(map(str, places))}"


def with_weights_in(section: ModelSection, place: str | Path) -> ModelSection:
    """Describe a model as a recipe does, but for its weights, which are those in a folder, or of another model."""
    return replace(section, name_or_path=str(place), revision=None, random_weights_seed=None)


def _at_path(path: Path) -> ModelLocation:
    """Describe an existing folder or file."""
    if path.is_dir():
        return ModelLocation(name_or_path=str(path))
    if path.suffix == ".gguf":
        return ModelLocation(name_or_path=str(path.parent), gguf_file=path.name)
    raise ModelError(
        f"model.name_or_path: {path} is a file but not a .gguf file",
        hint="name the folder that holds config.json and the safetensors files",
    )


def _package_resource(reference: str) -> Path:
    """Find `package://module/file` without importing the module."""
    module, _, resource = reference.removeprefix(PACKAGE_PREFIX).partition("/")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model.name_or_path: {reference}: no package `{module}` is installed",
            hint=f"pip install {module.replace('_', '-')}",
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    path = folder / resource
    if not path.exists():
        there = (
            ", ".join(sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("_"))) or "nothing"
        )
        raise ModelError(f"model.name_or_path: {reference}: package `{module}` has no {resource}; it has {there}")
    return path


def converted_folder(location: ModelLocation) -> Path:
    """Name the cache folder for the converted form of a GGUF file: one per content and converter version.

    The cache lies under `GRPO_CACHE`, or else the user's cache folder.
    """
    assert location.gguf_file is not None
    digest = hashlib.sha256(b"converter 1\n")
    with (Path(location.name_or_path) / location.gguf_file).open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "grpo"
    return Path(os.environ.get("GRPO_CACHE", default)) / "gguf" / digest.hexdigest()[:24]
