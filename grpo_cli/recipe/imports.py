"""Dotted paths such as `my_rewards.close_to`: found without running any code, or imported.

The recipe's folder comes first, then the working folder, then what is installed. `module:name` is allowed as well as
`module.name`.
"""

import ast
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import SOURCE_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from grpo_cli.errors import Problem, RecipeError
from grpo_cli.recipe.suggest import nearest

PACKAGE_PREFIX = "package://"
"""Before what is in an installed package: `package://package/file`."""

_FILE_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".gguf", ".txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """A dotted path taken apart.

    Attributes:
        spec: The innermost module on the path.
        names: What is left: attributes of that module.
    """

    spec: ModuleSpec
    names: tuple[str, ...]


def is_dotted_path(name: str, folder: Path) -> bool:
    """Tell whether a dataset's name means a Python function rather than a file or a hub id.

    Args:
        name: The recipe's `dataset.name`.
        folder: The recipe's folder.
    """
    parts = _parts(name)
    if len(parts) < 2 or not all(part.isidentifier() for part in parts) or name.endswith(_FILE_SUFFIXES):
        return False
    if (folder / name).exists() or Path(name).exists():
        return False
    return _find_top(parts[0], folder) is not None


def locate(dotted: str, folder: Path) -> str | None:
    """Look for what a dotted path names, without running its code.

    Args:
        dotted: Such as `package.module.function`.
        folder: The recipe's folder.

    Returns:
        None if it is there, or cannot be ruled out (a compiled module, a star import, a module-level `__getattr__`); else what
        is missing, with the nearest name.
    """
    parts = _parts(dotted)
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return "allowed: a dotted path, such as package.module.function"
    top = _find_top(parts[0], folder)
    if top is None:
        return f"no module `{parts[0]}` in {_places(folder)}{_guess(parts[0], _top_modules(folder))}"
    target = _follow(top, parts[1:])
    module, submodules = target.spec.name, sorted(_submodules(target.spec))
    names = _defined_names(target.spec)
    if isinstance(names, str):
        return names
    if not target.names:
        return f"`{module}` is a module; allowed: a name in it{_guess('', [*(names or ()), *submodules])}"
    if names is None or target.names[0] in names:
        return None
    return f"`{module}` has no `{target.names[0]}`{_guess(target.names[0], [*names, *submodules])}"


def package_folder(name: str) -> Path | None:
    """Find the folder of an installed package without running its code.

    Args:
        name: The package's; a package inside another is `outer.inner`.

    Returns:
        Its folder; None if there is no such package (a module of one file is none).
    """
    top, *inner = name.split(".")
    spec = find_installed(top)
    if spec is None:
        return None
    target = _follow(spec, inner)
    folders = list(target.spec.submodule_search_locations or ())
    return Path(folders[0]) if folders and not target.names else None


def resolve(dotted: str, folder: Path) -> Any:
    """Import what a dotted path names.

    The recipe's folder and the working folder stay on `sys.path`, so that the imported code can import its neighbours later.

    Args:
        dotted: Such as `package.module.function`.
        folder: The recipe's folder.

    Raises:
        RecipeError: If it is not there, or importing it fails.
    """
    missing = locate(dotted, folder)
    if missing is not None:
        raise _cannot_import(dotted, missing)
    _extend_search_path(folder)
    parts = _parts(dotted)
    top = _find_top(parts[0], folder)
    if top is None:  # located a moment ago
        raise _cannot_import(dotted, f"no module `{parts[0]}` in {_places(folder)}")
    _refuse_other_module(dotted, top)
    target = _follow(top, parts[1:])
    try:
        found: Any = importlib.import_module(target.spec.name)
        for index, name in enumerate(target.names):
            if not hasattr(found, name):
                owner = ".".join((target.spec.name, *target.names[:index]))
                raise _cannot_import(dotted, f"`{owner}` has no `{name}`{_guess(name, dir(found))}")
            found = getattr(found, name)
    except RecipeError:
        raise
    except Exception as error:
        raise _cannot_import(
            dotted, f"importing `{target.spec.name}` raised {type(error).__name__}: {error}"
        ) from error
    return found


def _parts(dotted: str) -> list[str]:
    return dotted.replace(":", ".", 1).split(".")


def _own_folders(folder: Path) -> list[str]:
    return list(dict.fromkeys(str(each.resolve()) for each in (folder, Path.cwd())))


def _places(folder: Path) -> str:
    return f"{', '.join(_own_folders(folder))} or installed"


def _find_top(name: str, folder: Path) -> ModuleSpec | None:
    """Find a top-level module; none is imported for it."""
    own = PathFinder.find_spec(name, _own_folders(folder))
    if own is not None and own.origin is not None:
        return own
    installed = find_installed(name)
    return installed if installed is not None else own


def find_installed(name: str) -> ModuleSpec | None:
    """Find a top-level module that is installed, without importing it."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _follow(spec: ModuleSpec, names: list[str]) -> _Target:
    """Walk into submodules as far as they go, without running the packages on the way."""
    for index, name in enumerate(names):
        locations = spec.submodule_search_locations
        inner = PathFinder.find_spec(f"{spec.name}.{name}", list(locations)) if locations is not None else None
        if inner is None:
            return _Target(spec=spec, names=tuple(names[index:]))
        spec = inner
    return _Target(spec=spec, names=())


def _defined_names(spec: ModuleSpec) -> list[str] | str | None:
    """Read the names that a module defines at its top level.

    Returns:
        The names; None if reading cannot tell; a message if the module is no valid Python.
    """
    if spec.origin is None:
        return []  # a namespace package: nothing but submodules
    path = Path(spec.origin)
    if path.suffix not in SOURCE_SUFFIXES or not path.is_file():
        return None
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        return f"{path}:{error.lineno}: {error.msg}"
    except ValueError as error:
        return f"{path}: {error}"
    names = list(dict.fromkeys(_names_in(tree.body)))
    return None if "*" in names or "__getattr__" in names else names


def _names_in(body: Iterable[ast.AST]) -> Iterator[str]:
    """List what statements bind, in blocks such as `if` and `try` too."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or (
                    alias.name if isinstance(statement, ast.ImportFrom) else alias.name.split(".")[0]
                )
        elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
            yield statement.id
        elif not isinstance(statement, ast.Lambda):
            yield from _names_in(ast.iter_child_nodes(statement))


def _submodules(spec: ModuleSpec) -> Iterator[str]:
    if spec.submodule_search_locations is not None:
        yield from (module.name for module in pkgutil.iter_modules(list(spec.submodule_search_locations)))


def _top_modules(folder: Path) -> list[str]:
    return [module.name for module in pkgutil.iter_modules([*_own_folders(folder), *sys.path])]


def _guess(word: str, names: list[str]) -> str:
    """Finish a message with the nearest name, or with all of them if they are few."""
    public = [name for name in names if not name.startswith("_")]
    close = nearest(word, public)
    if close is not None:
        return f" (did you mean `{close}`?)"
    return f" (it has {', '.join(public)})" if 0 < len(public) <= 12 else ""


def _extend_search_path(folder: Path) -> None:
    for place in reversed(_own_folders(folder)):
        if place not in sys.path:
            sys.path.insert(0, place)
    importlib.invalidate_caches()


def _refuse_other_module(dotted: str, spec: ModuleSpec) -> None:
    """Do not take a name from a module that merely is called the same and was imported before."""
    loaded = sys.modules.get(spec.name)
    origin = getattr(loaded, "__file__", None)
    if loaded is None or spec.origin is None or not spec.has_location:
        return
    if origin is None or Path(origin).resolve() != Path(spec.origin).resolve():
        raise _cannot_import(dotted, f"{spec.origin} has the name of another module, {origin or 'built in'}: rename it")


def _cannot_import(dotted: str, message: str) -> RecipeError:
    return RecipeError([Problem(where=dotted, key="", message=message)])
