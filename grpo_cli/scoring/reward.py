"""One reward: a callable, and which arguments it wants."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_cli.errors import RewardError
from grpo_cli.recipe.suggest import did_you_mean
from grpo_cli.scoring.event_loop import EventLoop
from grpo_cli.scoring.limits import CallLimits, Throttle

_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A reward function under its name. Build it with `make_reward`.

    Attributes:
        name: In metrics, files and messages.
        function: What is called; parameters of the recipe are bound.
        wanted: Parameters that are passed where they are available.
        required: Those of them without a default.
        takes_all: Whether it has `**kwargs` and gets everything that is not bound.
        bound: Parameters that already have their value and are never passed.
        is_async: Whether calling it gives a coroutine.
        limits: How calls are made.
        throttle: Lets those begin that are waited for.
        description: What it says of itself at the start, one line.
        loop: Where it is waited for; None: where all `async def` functions are.
        named_only: Arguments that `**kwargs` does not get.
    """

    name: str
    function: Callable[..., Any]
    wanted: frozenset[str]
    required: tuple[str, ...]
    takes_all: bool
    bound: frozenset[str]
    is_async: bool
    limits: CallLimits
    throttle: Throttle
    description: str | None = None
    loop: EventLoop | None = None
    named_only: frozenset[str] = frozenset()

    @property
    def source(self) -> Any:
        """The object behind the function; see `owner`."""
        return owner(self.function)

    def check_available(self, available: Iterable[str]) -> None:
        """Check that every required parameter is provided.

        Raises:
            RewardError: Naming the first one that is not, and what there is.
        """
        names = list(available)
        for parameter in self.required:
            if parameter in names:
                continue
            raise RewardError(
                f"reward function {self.name!r} needs {parameter!r}, which is neither a dataset column nor given by the "
                f"trainer; available: {', '.join(sorted(names))}",
                hint=did_you_mean(parameter, names)
                or "rename a column with `dataset.columns`, or give the parameter a default",
            )

    def select(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Pick what the function gets.

        Raises:
            RewardError: As `check_available`.
        """
        self.check_available(arguments)
        return {
            name: value
            for name, value in arguments.items()
            if name not in self.bound and (name in self.wanted or (self.takes_all and name not in self.named_only))
        }


def make_reward(name: str, function: Callable[..., Any], *, limits: CallLimits | None = None) -> Reward:
    """Look at a callable's signature: a function, a partial, a bound method, or an object with `__call__`; plain or async.

    Args:
        name: The reward's.
        function: What is called.
        limits: How; once for all completions of a step if left out.

    Raises:
        RewardError: If it cannot be called with keyword arguments.
    """
    parameters = signature_of(name, function).values()
    bound = frozenset(function.keywords) if isinstance(function, functools.partial) else frozenset()
    free = [parameter for parameter in parameters if parameter.name not in bound]
    for parameter in free:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise RewardError(
                f"reward function {name!r} takes {parameter.name!r} by position only; arguments are passed by keyword"
            )
    wanted = [parameter for parameter in free if parameter.kind in _KEYWORD]
    limits = limits or CallLimits()
    return Reward(
        name=name,
        function=function,
        wanted=frozenset(parameter.name for parameter in wanted),
        required=tuple(parameter.name for parameter in wanted if parameter.default is parameter.empty),
        takes_all=any(parameter.kind is parameter.VAR_KEYWORD for parameter in free),
        bound=bound,
        is_async=is_async(function),
        limits=limits,
        throttle=Throttle(limits),
        description=description_of(unbound(function)),
    )


def signature_of(name: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Read a callable's parameters.

    Raises:
        RewardError: If it has no readable signature.
    """
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward {name!r}: the parameters of {function!r} cannot be read", hint="wrap it in a function"
        ) from error


def unbound(function: Callable[..., Any]) -> Any:
    """Give the function behind a partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def description_of(source: Any) -> str | None:
    """Give what an object says of itself with `describe()`, one line; None if it has nothing to say."""
    describe = getattr(source, "describe", None)
    return str(describe()) if callable(describe) and not isinstance(source, type) else None


def has_state(source: Any) -> bool:
    """Tell whether an object behind a reward has a state that belongs into a checkpoint."""
    return not isinstance(source, type) and _handles_states(source)


def comes_with_state(target: Any) -> bool:
    """Tell the same of what a recipe names: of a class, whether the object that is made of it has one."""
    return _handles_states(target) if isinstance(target, type) else has_state(owner(target))


def _handles_states(source: Any) -> bool:
    methods = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
    # Weights of a module are not JSON, and do not change here.
    return methods and not hasattr(source, "named_parameters")


def owner(function: Callable[..., Any]) -> Any:
    """Give the object behind a function, which may have a state: of a partial its function, of a method its owner."""
    function = unbound(function)
    return function.__self__ if inspect.ismethod(function) else function


def is_async(function: Callable[..., Any]) -> bool:
    """Tell whether calling something gives a coroutine."""
    function = unbound(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004  asked for its kind, not whether it exists
