"""What a recipe names on disk and in Python: is it there, and are there enough rows?"""

import re
import shlex
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from grpo_cli.recipe.combinations import dataset_sections
from grpo_cli.recipe.eval_tasks import evaluation_tasks, reward_sections
from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.imports import PACKAGE_PREFIX, find_installed, is_dotted_path, locate, package_folder
from grpo_cli.recipe.rows import count_rows, is_local, matching_files
from grpo_cli.recipe.schema import DatasetSection, Recipe
from grpo_cli.recipe.suggest import did_you_mean

_HEAD_SLICE = re.compile(r"\[:(\d+)\]$")


def missing_things(recipe: Recipe, folder: Path, *, resumes: bool = False) -> Iterator[Finding]:
    """Run all checks that look at files and modules; nothing is imported or loaded.

    Args:
        recipe: Its values are allowed, each by itself.
        folder: The recipe's folder.
        resumes: Whether a run is to be resumed, so that adapters it went on from are not needed where they were.
    """
    yield from _reward_paths(recipe, folder)
    yield from _answer_functions(recipe, folder)
    for key, dataset in dataset_sections(recipe):
        yield from _dataset_source(key, dataset, folder)
    yield from _rows_for_a_step(recipe, folder)
    yield from _model_files(recipe, folder, resumes=resumes)
    if recipe.vllm.token_file is not None:
        yield from wrong_token_file(recipe.vllm.token_file, folder)


def _reward_paths(recipe: Recipe, folder: Path) -> Iterable[Finding]:
    for key, section in reward_sections(recipe):
        for index, entry in enumerate(section.reward_funcs):
            missing = locate(entry.path, folder) if entry.path is not None else None
            if missing is not None:
                yield Finding(keys=(f"{key}.reward_funcs[{index}].path",), message=f'found "{entry.path}"; {missing}')


def _answer_functions(recipe: Recipe, folder: Path) -> Iterable[Finding]:
    found = {task.key_of("answer_function"): task.settings.answer_function for task in evaluation_tasks(recipe)}
    for key, path in found.items():
        missing = locate(path, folder) if path is not None else None
        if missing is not None:
            yield Finding(keys=(key,), message=f'found "{path}"; {missing}')


def _dataset_source(key: str, dataset: DatasetSection, folder: Path) -> Iterable[Finding]:
    name, keys = dataset.name, (f"{key}.name",)
    if is_dotted_path(name, folder):
        missing = locate(name, folder)
        if missing is not None:
            yield Finding(keys=keys, message=f'found "{name}"; {missing}')
        return
    if dataset.arguments:
        yield Finding(
            keys=(f"{key}.arguments", f"{key}.name"),
            message=f'found arguments, but "{name}" is no function; allowed: with the dotted path of a function',
        )
    if is_local(name) and not matching_files(name, folder):
        yield _no_file(keys, name, folder)


def _rows_for_a_step(recipe: Recipe, folder: Path) -> Iterable[Finding]:
    """An epoch must fill at least one optimizer step."""
    dataset, needed = recipe.dataset, recipe.train.prompts_per_step
    step = f"one step takes {needed} prompts by `train.prompts_per_step`"
    head = _HEAD_SLICE.search(dataset.split)
    bounds = [("dataset.max_rows", dataset.max_rows), ("dataset.split", int(head[1]) if head else None)]
    hint = "use more rows, or lower `train.prompts_per_step`"
    for key, bound in bounds:
        if bound is not None and bound < needed:
            yield Finding(
                keys=(key, "train.prompts_per_step"),
                message=f"found {bound} rows, but {step}",
                hint=f"{hint} to {bound}",
            )
            return
    files = [] if is_dotted_path(dataset.name, folder) else matching_files(dataset.name, folder)
    try:
        rows = count_rows(files, enough=needed)
    except (OSError, ValueError) as error:
        yield Finding(keys=("dataset.name",), message=f'"{dataset.name}" cannot be read: {_first_line(error)}')
        return
    if rows is not None and rows < needed:
        yield Finding(
            keys=("dataset.name", "train.prompts_per_step"),
            message=f"found {rows} rows in {dataset.name}, but {step}",
            hint=f"{hint} to {rows}" if rows else "write some rows",
        )


def _model_files(recipe: Recipe, folder: Path, *, resumes: bool) -> Iterable[Finding]:
    model = recipe.model
    begun = None if model.lora is None or resumes else model.lora.adapter_name_or_path
    models = {
        "model.name_or_path": model.name_or_path,
        "model.tokenizer_name_or_path": model.tokenizer_name_or_path,
        "model.lora.adapter_name_or_path": begun,
    }
    for key, name in models.items():
        if name and name.startswith(PACKAGE_PREFIX):
            yield from _package_file(key, name)
        elif name and _is_path(name) and not matching_files(name, folder):
            yield _no_file((key,), name, folder)
    yield from _reward_models(recipe, folder)
    template = model.chat_template_path
    if template is not None and not matching_files(template, folder):
        yield _no_file(("model.chat_template_path",), template, folder)


def _reward_models(recipe: Recipe, folder: Path) -> Iterable[Finding]:
    for section_key, section in reward_sections(recipe):
        for index, entry in enumerate(section.reward_funcs):
            key, name = f"{section_key}.reward_funcs[{index}].model", entry.model
            if name and name.startswith(PACKAGE_PREFIX):
                yield Finding(keys=(key,), message=f'found "{name}"; allowed: a hub id or a folder')
            elif name and _is_path(name) and not matching_files(name, folder):
                yield _no_file((key,), name, folder)


def found_token_file(name: str, folder: Path) -> Path:
    """Give the path of a token file of which `wrong_token_file` reports nothing."""
    return matching_files(name, folder)[0]


def wrong_token_file(name: str, folder: Path) -> Iterator[Finding]:
    """Report a token file that is not there, or that is no secret.

    Args:
        name: The recipe's `vllm.token_file`.
        folder: The recipe's folder.
    """
    keys = ("vllm.token_file",)
    if not matching_files(name, folder):
        yield _no_file(keys, name, folder)
        return
    path = found_token_file(name, folder)
    if not path.is_file():
        yield Finding(keys=keys, message=f'found "{name}", which is no file; allowed: a file with the token')
    elif path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield Finding(
            keys=keys,
            message=f'found "{name}", which other users can read or change; allowed: a file for its owner alone',
            hint=f"chmod 600 {shlex.quote(str(path))}",
        )


def _package_file(key: str, name: str) -> Iterable[Finding]:
    """Look for `package://package/file`."""
    package, _, file = name.removeprefix(PACKAGE_PREFIX).partition("/")
    top, place = package.split(".")[0], package_folder(package)
    if place is None:
        yield Finding(
            keys=(key,),
            message=f'found "{name}", but "{package}" is no installed package; allowed: package://package/file',
            hint=f"pip install {top.replace('_', '-')}" if top and find_installed(top) is None else None,
        )
    elif not (place / file).exists():
        yield Finding(
            keys=(key,),
            message=f'found "{name}", but the package `{package}` has no {file}; allowed: a file or folder in it',
            hint=did_you_mean(file, [path.name for path in place.iterdir()]),
        )


def _is_path(name: str) -> bool:
    """Tell a model's path from a hub id."""
    return name.startswith((".", "/", "~")) or (name.endswith(".gguf") and "://" not in name)


def _no_file(keys: tuple[str, ...], name: str, folder: Path) -> Finding:
    parent = (folder / Path(name).expanduser()).parent
    neighbours = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    return Finding(
        keys=keys,
        message=f'found "{name}", which does not exist; allowed: a path from the recipe\'s folder or the working folder',
        hint=did_you_mean(Path(name).name, neighbours),
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
