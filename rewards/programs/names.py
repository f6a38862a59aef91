"""What names mean in tests: the program's, or Python's."""

import ast
import builtins
import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

from rewards.programs.peer import Peer

_BUILT_IN = frozenset(dir(builtins))


class Names(dict[str, Any]):
    """The built-in names of tests, and before them those of the program, which is asked each time that a test reads one.

    Args:
        peer: The program.
        modules: Its names, with the name of the module that each stands for; None for all else.
    """

    def __init__(self, peer: Peer, modules: Mapping[str, str | None]) -> None:
        super().__init__(vars(builtins))
        self._peer, self._modules = peer, modules
        self.kept: frozenset[str] = frozenset()
        """Names that mean what they mean in Python, whatever the program calls so."""

    def __getitem__(self, name: str) -> Any:
        if name not in self._modules or (name in self.kept and self._modules[name] != name):
            return super().__getitem__(name)
        return self.of_program(name)

    def has_of_program(self, name: str) -> bool:
        """Say whether the program has the name."""
        return name in self._modules

    def of_program(self, name: str) -> Any:
        """Give what the program calls so. A module that it imported is imported here: a test that uses its name means the real one.

        Raises:
            KeyError: If it has no such name (any more).
        """
        module = self._modules[name]
        return self._peer.ask("global", name) if module is None else importlib.import_module(module)

    def put_into(self, solution: types.ModuleType) -> None:
        """Let the names be imported; `*` imports none that means something in Python."""

        def find(name: str) -> Any:
            try:
                return self.of_program(name)
            except KeyError:
                raise AttributeError(name) from None

        names = self._modules.keys() - _BUILT_IN - sys.stdlib_module_names
        vars(solution).update({"__getattr__": find, "__all__": sorted(names)})


def kept_names(source: str, *, has_entry: bool) -> frozenset[str]:
    """Find the names that keep Python's meaning in a test: a program must not decide what `abs(f(1) - 3)` or `math.isclose` mean.

    The names of modules do where something is taken from them. Built-in names do where the test uses another name that is not its
    own; in `assert max([1, 3]) == 3` it is the program's `max` that is tested.

    Args:
        source: The test.
        has_entry: Whether it is called with the function that it tests.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return frozenset()  # which running it will tell
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bases = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    kept = frozenset(bases & (_BUILT_IN | sys.stdlib_module_names))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    imports_program = any(
        node.module == "solution" if isinstance(node, ast.ImportFrom) else any(a.name == "solution" for a in node.names)
        for node in imports
    )
    bound |= {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    others = loaded - bound - _BUILT_IN - (bases & sys.stdlib_module_names)
    return kept | _BUILT_IN if others or imports_program or has_entry else kept
