"""A recipe file and command-line overrides to a `Recipe`, or to all of its problems at once."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from grpo_cli.errors import Problem, RecipeError
from grpo_cli.recipe.combinations import impossible_combinations
from grpo_cli.recipe.document import RecipeDumper
from grpo_cli.recipe.files import missing_things
from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.interpolation import escape, resolve_interpolations
from grpo_cli.recipe.layers import read_layers
from grpo_cli.recipe.notices import notices
from grpo_cli.recipe.override import apply_overrides
from grpo_cli.recipe.position import COMMAND_LINE, Placed, find, key_text, leaves, place, split_key, where_of
from grpo_cli.recipe.schema import Recipe
from grpo_cli.recipe.validate import Checked, check


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRecipe:
    """A recipe and where it came from.

    Attributes:
        recipe: All values, defaults included.
        path: The file.
        folder: The file's folder, from which relative paths and dotted paths start.
        notices: One line each about what is allowed and probably not meant.
        chosen: The keys with a value that the file, one it extends or an override gave, such as `vllm.mode`.
    """

    recipe: Recipe
    path: Path
    folder: Path
    notices: tuple[str, ...]
    chosen: frozenset[str]


def load_recipe(
    path: Path, overrides: Sequence[str] = (), *, look_for_files: bool = True, resumes: bool = False
) -> LoadedRecipe:
    """Read a recipe and check all that can be checked before a model loads.

    Args:
        path: A YAML file.
        overrides: `key=value`, laid over the file.
        look_for_files: Also see that what it names on disk and in Python is there. A machine that only samples needs little of it.
        resumes: Whether a run is to be resumed. Its checkpoints hold the adapters that it went on from, which may be gone.

    Raises:
        RecipeError: With every problem of the recipe.
    """
    problems: list[Problem] = []
    root = read_layers(path, problems)
    if root is None:
        raise RecipeError(_in_order(problems))
    root = _name_the_run(_spell_out_rewards(root), path)
    root = _spell_out_rewards(apply_overrides(root, overrides, problems))
    unresolved: list[Problem] = []
    root = resolve_interpolations(root, unresolved)
    checked = check(root)
    blamed = {problem.key for problem in unresolved}
    problems += [*unresolved, *(problem for problem in checked.problems if problem.key not in blamed)]
    recipe = _build(checked)
    folder = path.parent.resolve()
    missing = missing_things(recipe, folder, resumes=resumes) if look_for_files else ()
    findings = [*impossible_combinations(recipe), *missing]
    refused = checked.refused | blamed
    problems += [_as_problem(finding, root) for finding in findings if not _depends_on(finding, refused)]
    if problems:
        raise RecipeError(_in_order(problems))
    chosen = frozenset(key_text(key) for key, _ in leaves(root))
    return LoadedRecipe(recipe=recipe, path=path, folder=folder, notices=notices(recipe), chosen=chosen)


def dump_recipe(recipe: Recipe) -> str:
    """Write a recipe as YAML with every key; loading it gives the same recipe."""
    return yaml.dump(
        escape(dataclasses.asdict(recipe)), Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=120
    )


def _name_the_run(root: Placed, path: Path) -> Placed:
    if not isinstance(root.value, dict) or "run_name" in root.value:
        return root
    return replace(root, value={"run_name": place(escape(path.stem), root.where), **root.value})


def _spell_out_rewards(root: Placed) -> Placed:
    """Turn each reward that is a plain string into `{path: ...}`."""
    named = find(root, "eval.datasets")
    datasets = named.value if named is not None and isinstance(named.value, dict) else {}
    for path in (("rewards",), *(("eval", "datasets", name) for name in datasets)):
        root = _with_mappings(root, (*path, "reward_funcs"))
    return root


def _with_mappings(placed: Placed, path: tuple[str, ...]) -> Placed:
    """Give a copy in which each string of the list at a path is a mapping with that path of a function."""
    if not path and isinstance(placed.value, list):
        items = [replace(item, value={"path": item}) if isinstance(item.value, str) else item for item in placed.value]
        return replace(placed, value=items)
    if not path or not isinstance(placed.value, dict) or path[0] not in placed.value:
        return placed
    return replace(placed, value={**placed.value, path[0]: _with_mappings(placed.value[path[0]], path[1:])})


@functools.cache
def _schema() -> Any:
    """Give the schema as OmegaConf has it, which takes as long to make as all else that is done with a recipe; merging copies it."""
    return OmegaConf.structured(Recipe)


def _build(checked: Checked) -> Recipe:
    merged = OmegaConf.merge(_schema(), OmegaConf.create(escape(checked.values)))
    return cast("Recipe", OmegaConf.to_object(merged))


def _as_problem(finding: Finding, root: Placed) -> Problem:
    return Problem(where=where_of(root, *finding.keys), key=finding.keys[0], message=finding.message, hint=finding.hint)


def _depends_on(finding: Finding, refused: set[str]) -> bool:
    """Tell whether a key of the finding, a part of it or what it is a part of was refused."""
    for key in finding.keys:
        path = split_key(key)
        for other in map(split_key, refused):
            shared = min(len(path), len(other))
            if path[:shared] == other[:shared]:
                return True
    return False


def _in_order(problems: list[Problem]) -> list[Problem]:
    """Sort by file and line, the command line last."""

    def position(problem: Problem) -> tuple[Any, ...]:
        file, _, line = problem.where.rpartition(":")
        return (problem.where == COMMAND_LINE, file, int(line) if line.isdigit() else 0)

    return sorted(problems, key=position)
