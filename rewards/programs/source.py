"""Runs Python source as a module, without a file."""

import sys
import types
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec


class _Text(SourceFileLoader):
    """Loads a text; tracebacks show its lines."""

    def __init__(self, name: str, source: str) -> None:
        super().__init__(name, f"{name.strip('_')}.py")
        self._source = source.encode("utf-8", "surrogatepass")

    def get_data(self, path: str) -> bytes:
        """Give the text for every path: none is ever written."""
        del path
        return self._source

    def path_stats(self, path: str) -> dict[str, float]:
        """Refuse to know a file, so that no compiled one is looked for."""
        raise FileNotFoundError(path)


def new_module(name: str) -> types.ModuleType:
    """Make an empty module that can be imported by its name."""
    module = module_from_spec(ModuleSpec(name, None))
    sys.modules[name] = module
    return module


def run_in(module: types.ModuleType, source: str) -> None:
    """Run source in a module that may hold names already.

    Raises:
        BaseException: What the source raises, SyntaxError if it is no Python.
    """
    loader = _Text(module.__name__, source)
    module.__loader__ = loader
    loader.exec_module(module)
