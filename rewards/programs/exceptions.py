"""Exceptions of another process: real classes stand in for its own, so that a test can catch them by class or by base class."""

import builtins
import sys
from collections.abc import Callable
from typing import Any


class RemoteError(Exception):
    """An exception of the other process that cannot be told in any other way."""


class _StandIn:
    """What the classes made here have in common: the text of the original, and its attributes."""

    remote_text: str | None = None
    remote: Any = None

    def __str__(self) -> str:
        return super().__str__() if self.remote_text is None else self.remote_text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.remote is None:
            raise AttributeError(name)
        return getattr(self.remote, name)


def written_class(kind: type[BaseException], number: Callable[[Any], int]) -> Any:
    """Describe a class: a built-in one by its name, others by number, module, name and base classes.

    Args:
        kind: The class.
        number: Gives the number under which this process knows it.
    """
    if getattr(builtins, kind.__name__, None) is kind:
        return kind.__name__
    bases = [written_class(base, number) for base in kind.__bases__ if issubclass(base, BaseException)]
    return [number(kind), str(kind.__module__), kind.__name__, bases]


class ExceptionClasses:
    """Classes of the other process, each with one class that stands for it here."""

    def __init__(self) -> None:
        self._made: dict[int, type[Exception]] = {}
        self._numbers: dict[type, int] = {}

    def number(self, kind: type) -> int | None:
        """Give the number under which the other process knows a class; None for one that is not its own."""
        return self._numbers.get(kind)

    def read(self, content: Any) -> type[Exception]:
        """Find the class that was described; one of the standard library's if a test can name it, else one that is made here.

        Raises:
            ValueError: If it is no description of an exception's class.
        """
        if isinstance(content, str):
            return _exception_class(getattr(builtins, content, None))
        number, module, name, bases = content
        if not isinstance(number, int) or not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("not a class")  # noqa: TRY004  as for all that is read
        if number not in self._made:
            self._made[number] = _standard_class(module, name) or _made_class(name, [self.read(each) for each in bases])
            self._numbers.setdefault(self._made[number], number)
        return self._made[number]


def new_exception(kind: type[Exception], arguments: tuple[Any, ...], text: str, remote: Any) -> Exception:
    """Make an exception of a class that was read."""
    try:
        error = kind(*arguments)
    except Exception:  # noqa: BLE001  one that wants other arguments than it keeps
        error = kind.__new__(kind, *arguments)
    if isinstance(error, _StandIn):
        error.remote_text, error.remote = text, remote
    return error


def _exception_class(kind: Any) -> type[Exception]:
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind
    raise ValueError("not an exception's class")


def _standard_class(module: str, name: str) -> type[Exception] | None:
    """Find a class of the standard library whose module is imported here: others no test can name."""
    is_standard = module.partition(".")[0] in sys.stdlib_module_names
    found = getattr(sys.modules.get(module), name, None) if is_standard else None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _made_class(name: str, bases: list[type[Exception]]) -> type[Exception]:
    known = tuple(bases) or (Exception,)
    first = () if any(issubclass(base, _StandIn) for base in known) else (_StandIn,)
    try:
        return type(name, (*first, *known), {})
    except TypeError:  # bases that do not go together here
        return type(name, (_StandIn, Exception), {})
