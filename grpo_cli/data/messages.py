"""Chat turns as they come from a dataset column, checked and put into the form that a chat template expects."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_cli.errors import DataError
from grpo_cli.types import Message

_OPENING_ROLES = frozenset({"system", "developer"})


def read_messages(column: Sequence[Any], *, where: str) -> list[Message]:
    """Check the turns of a conversational prompt and drop what is not set.

    A column of structs has every key in every turn, None where a turn lacks it; templates tell these two apart.

    Args:
        column: The `prompt` column of a row: a list of turns.
        where: Names the row in errors.

    Returns:
        New turns with `role`, `content` (None if missing) and every other key that is set.

    Raises:
        DataError: If a turn is not a mapping with a role, or its content is neither text nor a list of text parts.
    """
    return [_read_message(message, where=f"{where}: message {index}") for index, message in enumerate(column)]


def is_blank(message: Message) -> bool:
    """Tell whether a turn says nothing: no text, and nothing else but its role."""
    return not _text(message["content"]).strip() and message.keys() <= {"role", "content"}


def lacks_content(message: Message) -> bool:
    """Tell whether a turn has no content and nothing else either; templates would write `None`."""
    return message["content"] is None and message.keys() <= {"role", "content"}


def with_system_prompt(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """Put a system turn in front, unless the prompt brings its own (or a developer turn)."""
    if system_prompt is None or any(message["role"] in _OPENING_ROLES for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def split_continuation(messages: list[Message], *, where: str) -> tuple[list[Message], bool]:
    """Tell whether the last turn is an assistant's that is to be continued.

    An assistant turn without text is the same as the generation prompt of the template, so it is left out.

    Returns:
        The turns to render, and whether to continue the last of them.

    Raises:
        DataError: If the last assistant turn has no text but other fields, such as tool calls, that would be lost.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return messages, False
    if _text(last["content"]):
        return messages, True
    others = sorted(last.keys() - {"role", "content"})
    if others:
        raise DataError(
            f"{where}: the last turn is an assistant's without content but with {', '.join(others)}; it cannot be continued",
            hint="end the prompt with the turn that the model answers",
        )
    return messages[:-1], False


def _read_message(message: Any, *, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {type(message).__name__}; allowed: a mapping with `role` and `content`")
    if not isinstance(message.get("role"), str):
        keys = ", ".join(str(key) for key in message) or "nothing"
        raise DataError(f"{where} has no `role`; it has {keys}", hint="a turn is {role: user, content: ...}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = [_read_part(part, where=where) for part in content]
    elif not isinstance(content, str | None):
        raise DataError(f"{where}: content is {type(content).__name__}; allowed: a string or a list of text parts")
    return {key: value for key, value in message.items() if value is not None} | {"content": content}


def _read_part(part: Any, *, where: str) -> dict[str, Any]:
    """Take one part of a content list; only text is understood."""
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {key: value for key, value in part.items() if value is not None}
    found = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise DataError(f"{where}: content has a part of type {found}; allowed: {{type: text, text: ...}}")


def _text(content: str | Iterable[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content)
