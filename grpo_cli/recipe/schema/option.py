"""One recipe key: its default, its meaning and the range that is allowed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Limits of a number, or of a list's or string's length where `length` is set."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    length: bool = False

    def allows(self, value: float) -> bool:
        """Tell whether the value lies inside."""
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = (("at least", self.minimum), ("above", self.above), ("at most", self.maximum), ("below", self.below))
        return " and ".join(f"{word} {_number(limit)}" for word, limit in limits if limit is not None)


def _number(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def option(
    default: Any = MISSING,
    *,
    help: str,  # noqa: A002  the word that users of Typer and argparse know
    factory: Callable[[], Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    non_empty: bool = False,
) -> Any:
    """Declare a recipe key as a dataclass field.

    Args:
        default: Its value when the recipe is silent; left out, the key is required.
        help: One or two sentences for the README's table.
        factory: Makes the default of a list, mapping or section.
        minimum: Smallest value allowed.
        maximum: Largest value allowed.
        above: The value must be greater.
        below: The value must be smaller.
        non_empty: A list or string must have at least one element.
    """
    limits = (
        Range(minimum=1, length=True)
        if non_empty
        else Range(minimum=minimum, maximum=maximum, above=above, below=below)
    )
    metadata = {"help": help, "range": limits}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)
