"""A dataset row becomes a prompt: text or chat template, tokens, length policy.

A row that cannot be used is `Rejected` with a reason that the caller counts. What no row of a sound dataset has, such as a
prompt of type int, is a `DataError`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_cli.data.columns import PROMPT, missing_prompt
from grpo_cli.data.fingerprint import digest
from grpo_cli.data.messages import is_blank, lacks_content, read_messages, split_continuation, with_system_prompt
from grpo_cli.errors import DataError
from grpo_cli.recipe.schema import DatasetSection
from grpo_cli.types import Message, Prompt, PromptId

TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""Column with variables for the chat template; they override those of the recipe."""

NONE = "prompt is None"
EMPTY = "prompt is empty"
NO_CONTENT = "a message has no content"
NO_TOKENS = "prompt has no tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A row that gives no prompt.

    Attributes:
        reason: The same text for all rows with the same fault, so that they can be counted.
    """

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendered:
    """A prompt before tokenization.

    Attributes:
        text: What is tokenized.
        messages: The turns that it was made of; None for a plain string.
        add_special_tokens: Whether the tokenizer adds its own, such as BOS. A chat template writes them itself.
    """

    text: str
    messages: tuple[Message, ...] | None
    add_special_tokens: bool


class PromptBuilder:
    """Builds prompts as the recipe says.

    Args:
        tokenizer: The policy's, a `PreTrainedTokenizerBase`.
        section: The recipe's `dataset:`, or its `eval.dataset:`.
    """

    def __init__(self, tokenizer: Any, section: DatasetSection) -> None:
        self._tokenizer = tokenizer
        self._section = section

    def build(self, row: Mapping[str, Any], uid: PromptId) -> Prompt | Rejected:
        """Build the prompt of one row.

        A string is tokenized as it is, with the tokenizer's special tokens (once, if the text already starts with BOS). A list
        of messages goes through the chat template and ends with its generation prompt; a last assistant turn is continued
        instead.

        Args:
            row: The columns, after `columns:` mapping.
            uid: `epoch:row`.

        Raises:
            DataError: If there is no prompt column, its type is not supported, the chat template is missing or fails, or the
                prompt is too long under the policy `error`.
        """
        encoded = self.encode([row], [uid])[0]
        return encoded if isinstance(encoded, Rejected) else self.limit(encoded)

    def encode(self, rows: Iterable[Mapping[str, Any]], uids: Iterable[PromptId]) -> list[Prompt | Rejected]:
        """Build prompts of any length, tokenized together because that is faster."""
        pairs = list(zip(rows, uids, strict=True))
        rendered = [self._render(row, _where(uid)) for row, uid in pairs]
        ids = iter(self._tokenize([one for one in rendered if isinstance(one, _Rendered)]))
        return [
            one if isinstance(one, Rejected) else _prompt(row, uid, one, next(ids))
            for (row, uid), one in zip(pairs, rendered, strict=True)
        ]

    def limit(self, prompt: Prompt) -> Prompt | Rejected:
        """Apply `max_prompt_length`. A prompt cut from the left keeps the BOS token that it starts with."""
        longest = self._section.max_prompt_length
        if longest is None or len(prompt.ids) <= longest:
            return prompt
        if self._section.max_prompt_length_policy == "drop":
            return Rejected(reason=f"prompt is longer than {longest} tokens")
        if self._section.max_prompt_length_policy == "error":
            raise DataError(
                f"{_where(prompt.uid)}: the prompt has {len(prompt.ids)} tokens; allowed by dataset.max_prompt_length: {longest}",
                hint="raise it, or set dataset.max_prompt_length_policy to drop or truncate_left",
            )
        bos = prompt.ids[:1] if prompt.ids[0] == self._tokenizer.bos_token_id and longest > 1 else ()
        ids = bos + prompt.ids[len(prompt.ids) - longest + len(bos) :]
        return replace(prompt, ids=ids, text=self._tokenizer.decode(ids, skip_special_tokens=False))

    def fingerprint(self) -> str:
        """Hash everything besides the row that a prompt is made of."""
        section = self._section
        return digest(
            [
                section.conversational,
                section.system_prompt,
                dict(section.chat_template_kwargs),
                section.max_prompt_length,
                section.max_prompt_length_policy,
                self._tokenizer.chat_template,
                len(self._tokenizer),
            ]
        )

    def _render(self, row: Mapping[str, Any], where: str) -> _Rendered | Rejected:
        """Turn the prompt column into the text to tokenize."""
        if PROMPT not in row:
            raise missing_prompt(row)
        prompt = row[PROMPT]
        if prompt is None:
            return Rejected(reason=NONE)
        if isinstance(prompt, str):
            if not prompt.strip():
                return Rejected(reason=EMPTY)
            return self._render_text(prompt, row, where)
        if isinstance(prompt, list | tuple):
            return self._render_chat(read_messages(prompt, where=where), row, where)
        raise DataError(
            f"{where}: prompt is {type(prompt).__name__}; allowed: a string, or a list of messages",
            hint="a message is {role: user, content: ...}; dataset.columns can name another column",
        )

    def _render_text(self, prompt: str, row: Mapping[str, Any], where: str) -> _Rendered | Rejected:
        if self._section.conversational:
            return self._render_chat([{"role": "user", "content": prompt}], row, where)
        if self._section.system_prompt is not None:
            raise DataError(
                f"{where}: prompt is a string, which has no place for dataset.system_prompt",
                hint="set dataset.conversational to true, so that it becomes a user message",
            )
        bos = self._tokenizer.bos_token
        return _Rendered(text=prompt, messages=None, add_special_tokens=not (bos and prompt.startswith(bos)))

    def _render_chat(self, turns: list[Message], row: Mapping[str, Any], where: str) -> _Rendered | Rejected:
        if all(is_blank(turn) for turn in turns):
            return Rejected(reason=EMPTY)
        if self._tokenizer.chat_template is None and "chat_template" not in self._section.chat_template_kwargs:
            raise DataError(
                f"{where}: the prompt is a list of messages, but the tokenizer has no chat template",
                hint="name a template file in model.chat_template_path, or use string prompts with dataset.conversational off",
            )
        messages, continued = split_continuation(with_system_prompt(turns, self._section.system_prompt), where=where)
        if any(lacks_content(message) for message in messages):
            return Rejected(reason=NO_CONTENT)
        arguments = {**self._section.chat_template_kwargs, **_template_arguments(row, where)}
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                **arguments,
            )
        except Exception as error:  # a template is a program that comes with the model or the recipe
            raise DataError(f"{where}: the chat template refuses the prompt: {' '.join(str(error).split())}") from error
        return _Rendered(text=text, messages=tuple(messages), add_special_tokens=False)

    def _tokenize(self, rendered: Sequence[_Rendered]) -> list[tuple[int, ...]]:
        """Tokenize texts, those that get special tokens and those that do not each in one call."""
        ids: list[tuple[int, ...]] = [()] * len(rendered)
        for special in (True, False):
            places = [place for place, one in enumerate(rendered) if one.add_special_tokens is special]
            if not places:
                continue
            encoded = self._tokenizer(
                [rendered[place].text for place in places],
                add_special_tokens=special,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # the length policy is ours
            )
            for place, found in zip(places, encoded["input_ids"], strict=True):
                ids[place] = tuple(found)
        return ids


def prompt_id(epoch: int, row: int) -> PromptId:
    """Name a draw of a row."""
    return PromptId(f"{epoch}:{row}")


def _prompt(row: Mapping[str, Any], uid: PromptId, rendered: _Rendered, ids: tuple[int, ...]) -> Prompt | Rejected:
    if not ids:
        return Rejected(reason=NO_TOKENS)
    return Prompt(uid=uid, ids=ids, text=rendered.text, messages=rendered.messages, row=dict(row))


def _where(uid: PromptId) -> str:
    return f"dataset: row {uid.rpartition(':')[2]}"


def _template_arguments(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read the row's own template variables; a column of structs has None where a row lacks one."""
    arguments = row.get(TEMPLATE_ARGUMENTS)
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: {TEMPLATE_ARGUMENTS} is {type(arguments).__name__}; allowed: a mapping")
    return {name: value for name, value in arguments.items() if value is not None}
