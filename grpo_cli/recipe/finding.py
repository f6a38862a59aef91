"""What a check across keys reports."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that each key allows and all of them together do not.

    Attributes:
        keys: All keys that take part; the first is the one to change. The finding stands only if none of them has a problem
            of its own.
        message: What was found and what is allowed.
        hint: The likely fix.
    """

    keys: tuple[str, ...]
    message: str
    hint: str | None = None
