"""The text of a completion, whichever format the dataset has."""

from collections.abc import Mapping, Sequence
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]
"""A string (standard format), or a list of messages (conversational format)."""


def text_of(completion: Completion) -> str:
    """Give a completion's text: the string itself, or the contents of its messages one after another.

    A content that is a list of parts (`{"type": "text", "text": ...}`) counts with its text parts.
    """
    if isinstance(completion, str):
        return completion
    return "".join(_content_text(message.get("content")) for message in completion)


def _content_text(content: Any) -> str:
    if content is None:  # a message that only calls tools
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
