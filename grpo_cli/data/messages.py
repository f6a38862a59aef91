"""Chat turns as they come from a dataset column, checked and put into the form that a chat template expects."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_cli.errors import DataError
from grpo_cli.types import IMAGE, Message

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
        DataError: If a turn is not a mapping with a role, or its content is neither text nor a list of parts: texts, and images as
            `{type: image}`, with the image itself under `image`, `path`, `url` or `base64` if it is there.
    """
    return [_read_message(message, where=f"{where}: message {index}") for index, message in enumerate(column)]


def place_images(messages: list[Message], images: Sequence[Any], *, where: str) -> tuple[list[Message], list[Any]]:
    """Bring together a prompt's images and their places.

    Images of the row go to the places without one, in their order. If no message has a place for an image, all of them come before the
    text of the first user's turn.

    Args:
        messages: From `read_messages`.
        images: The row's, from its columns.
        where: Names the row in errors.

    Returns:
        New turns, with `{type: image}` in each image's place; and all images in the order of their places.

    Raises:
        DataError: If there are more places than images or fewer, or no user's turn.
    """
    parts = [part for message in messages for part in _parts(message["content"]) if part["type"] == IMAGE]
    if not parts:
        return (_put_in_front(messages, len(images), where=where) if images else messages), list(images)
    places = sum(IMAGE not in part for part in parts)
    if places != len(images):
        raise DataError(
            f"{where}: the messages have {places} place(s) for images of the row, which has {len(images)}",
            hint="write one {type: image} for each image, in their order, or none: then all come before the first user's text",
        )
    rest = iter(images)
    found = [part[IMAGE] if IMAGE in part else next(rest) for part in parts]
    return [_without_images(message) for message in messages], found


def has_image(message: Message) -> bool:
    """Tell whether a turn has an image, or a place for one."""
    return any(part["type"] == IMAGE for part in _parts(message["content"]))


def in_parts(message: Message) -> dict[str, Any]:
    """Write a turn as templates of vision-language models read it: text as a list of one part."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def is_blank(message: Message) -> bool:
    """Tell whether a turn says nothing: no text, no image, and nothing else but its role."""
    return not has_image(message) and not _text(message["content"]).strip() and message.keys() <= {"role", "content"}


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
        found = "null" if message is None else type(message).__name__
        raise DataError(f"{where} is {found}; allowed: a mapping with `role` and `content`")
    if not isinstance(message.get("role"), str):
        keys = ", ".join(str(key) for key, value in message.items() if value is not None) or "nothing"
        raise DataError(f"{where} has no `role`; it has {keys}", hint="a turn is {role: user, content: ...}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = [_read_part(part, where=where) for part in content]
    elif not isinstance(content, str | None):
        raise DataError(f"{where}: content is {type(content).__name__}; allowed: a string or a list of parts")
    return {key: value for key, value in message.items() if value is not None} | {"content": content}


def _read_part(part: Any, *, where: str) -> dict[str, Any]:
    """Take one part of a content list: a text, or an image's place with the image under `image` if it stands there."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {key: value for key, value in part.items() if value is not None}
    if kind in {IMAGE, "image_url"}:
        given = _image_of(part)
        return {"type": IMAGE} if given is None else {"type": IMAGE, IMAGE: given}
    if kind == "text":
        found = "a text without `text`"
    elif isinstance(part, Mapping):
        found = "a part without a type" if kind is None else f"a part of type {kind}"
    else:
        found = "null" if part is None else f"{type(part).__name__} as a part"
    raise DataError(f"{where}: content has {found}; allowed: {{type: text, text: ...}} and {{type: image}}")


def _image_of(part: Mapping[str, Any]) -> Any:
    """Give the image that stands in a part; None: only its place is there."""
    given = next((part[key] for key in (IMAGE, "path", "url", "image_url") if part.get(key) is not None), None)
    if given is None and part.get("base64") is not None:
        return f"data:;base64,{part['base64']}"
    return given


def _put_in_front(messages: list[Message], count: int, *, where: str) -> list[Message]:
    """Put places for images before the text of the first user's turn."""
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise DataError(f"{where}: there is no place for {count} images: no message has the role user")
    turn = in_parts(messages[first])
    turn["content"] = [*({"type": IMAGE} for _ in range(count)), *(turn["content"] or ())]
    return [*messages[:first], turn, *messages[first + 1 :]]


def _without_images(message: Message) -> Message:
    """Leave only the places of images."""
    content = message["content"]
    if content is None or isinstance(content, str):
        return message
    return {**message, "content": [{"type": IMAGE} if part["type"] == IMAGE else part for part in content]}


def _parts(content: Any) -> Sequence[Mapping[str, Any]]:
    """Give the parts of a content list; none of a plain text."""
    return () if content is None or isinstance(content, str) else content


def _text(content: str | Iterable[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content)
