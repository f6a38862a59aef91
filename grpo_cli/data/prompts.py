"""A dataset row becomes a prompt: text or chat template, images, tokens, length policy.

A row that cannot be used is `Rejected` with a reason that the caller counts. What no row of a sound dataset has, such as a
prompt of type int, is a `DataError`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_cli.data.columns import PROMPT, missing_prompt
from grpo_cli.data.fingerprint import digest
from grpo_cli.data.images import ImagePlaces, column_images, encoded, is_nothing, unreadable
from grpo_cli.data.messages import (
    has_image,
    in_parts,
    is_blank,
    lacks_content,
    place_images,
    read_messages,
    split_continuation,
    with_system_prompt,
)
from grpo_cli.errors import DataError
from grpo_cli.recipe.schema import DatasetSection
from grpo_cli.types import IMAGE, IMAGES, Message, Prompt, PromptId
from grpo_cli.vision.pictures import DamagedImageError
from grpo_cli.vision.processor import VisionProcessor

TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""Column with variables for the chat template; they override those of the recipe."""

NONE = "prompt is null"
EMPTY = "prompt is empty"
NO_CONTENT = "a message has no content"
TOO_LONG = "is longer than"
NO_TOKENS = "prompt has no tokens"
NO_IMAGE = "the text has tokens that stand for images"

_MOST_UNUSABLE = 256
"""Rows with images that are passed over one after another: if as many cannot be used, something else is wrong, such as the network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A row that gives no prompt.

    Attributes:
        reason: The same text for all rows with the same fault, so that they can be counted.
        of_images: Whether its images cannot be used, which shows only when they are opened.
    """

    reason: str
    of_images: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A prompt before tokenization.

    Attributes:
        row: The columns.
        uid: Of the draw.
        text: What is tokenized.
        messages: The turns that it was made of; None for a plain string.
        images: As the dataset has them, not opened, in the order of their places in the text.
        add_special_tokens: Whether the tokenizer adds its own, such as BOS. A chat template writes them itself.
    """

    row: Mapping[str, Any]
    uid: PromptId
    text: str
    messages: tuple[Message, ...] | None
    images: tuple[Any, ...]
    add_special_tokens: bool


class PromptBuilder:
    """Builds prompts as the recipe says.

    Args:
        tokenizer: The policy's, a `PreTrainedTokenizerBase`.
        section: The recipe's `dataset:`, or its `eval.dataset:`.
        vision: Prepares images; None: the dataset has none.
        places: Where paths of images lead.
    """

    def __init__(
        self,
        tokenizer: Any,
        section: DatasetSection,
        *,
        vision: VisionProcessor | None = None,
        places: ImagePlaces | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._section = section
        self._vision = vision
        self._places = places or ImagePlaces()
        self._first_unusable: str | None = None
        self._unusable_in_a_row = 0

    @property
    def vision(self) -> VisionProcessor | None:
        """What prepares images; None: the dataset has none."""
        return self._vision

    def build(self, row: Mapping[str, Any], uid: PromptId, *, passes_over_images: bool = False) -> Prompt | Rejected:
        """Build the prompt of one row.

        A string is tokenized as it is, with the tokenizer's special tokens (once, if the text already starts with BOS). A list
        of messages goes through the chat template and ends with its generation prompt; a last assistant turn is continued
        instead. Where images stand, the tokens are as many as the model has features of them.

        Args:
            row: The columns, after `columns:` mapping.
            uid: `epoch:row`.
            passes_over_images: Reject the row if its images cannot be used; see `tokenize`.

        Raises:
            DataError: If there is no prompt column, its type is not supported, the chat template is missing or fails, an image
                cannot be read or has no place, or the prompt is too long under the policy `error`.
        """
        one = self.encode([row], [uid], passes_over_images=passes_over_images)[0]
        return one if isinstance(one, Rejected) else self.limit(one)

    def encode(
        self, rows: Iterable[Mapping[str, Any]], uids: Iterable[PromptId], *, passes_over_images: bool = False
    ) -> list[Prompt | Rejected]:
        """Build prompts of any length, tokenized together because that is faster."""
        return self.tokenize(self.render(rows, uids), passes_over_images=passes_over_images)

    def render(self, rows: Iterable[Mapping[str, Any]], uids: Iterable[PromptId]) -> list[Rendered | Rejected]:
        """Do what comes before tokenization, which does not open images."""
        return [self._render(row, uid) for row, uid in zip(rows, uids, strict=True)]

    def tokenize(
        self, rendered: Sequence[Rendered | Rejected], *, passes_over_images: bool = False
    ) -> list[Prompt | Rejected]:
        """Do the rest.

        Args:
            rendered: From `render`.
            passes_over_images: Reject rows whose images cannot be used. A run that has begun does, with rows that nobody has prepared
                before: it would meet the same one whenever it goes on.

        Raises:
            DataError: If images cannot be used: one without `passes_over_images`, a great many in a row with it.
        """
        plain = [one for one in rendered if isinstance(one, Rendered) and not one.images]
        ids = iter(self._tokenize(plain))
        with_images = self._with_usable_images if passes_over_images else self._with_images
        return [
            one if isinstance(one, Rejected) else with_images(one) if one.images else self._plain(one, next(ids))
            for one in rendered
        ]

    def limit(self, prompt: Prompt) -> Prompt | Rejected:
        """Apply `max_prompt_length`.

        A prompt cut from the left keeps the BOS token that it starts with. One with images is never cut: it is left out.
        """
        longest, policy = self._section.max_prompt_length, self._section.max_prompt_length_policy
        if longest is None or len(prompt.ids) <= longest:
            return prompt
        if policy == "error":
            of_images = f", {self.count_image_tokens(prompt)} of them for images" if prompt.images else ""
            raise DataError(
                f"{_where(prompt.uid)}: the prompt has {len(prompt.ids)} tokens{of_images}; "
                f"allowed by dataset.max_prompt_length: {longest}",
                hint="raise it, or set dataset.max_prompt_length_policy to drop or truncate_left"
                + ("; model.processor_kwargs can make images smaller" if prompt.images else ""),
            )
        if prompt.images:
            return Rejected(reason=f"prompt with images {TOO_LONG} {longest} tokens")
        if policy == "drop":
            return Rejected(reason=f"prompt {TOO_LONG} {longest} tokens")
        bos = prompt.ids[:1] if prompt.ids[0] == self._tokenizer.bos_token_id and longest > 1 else ()
        ids = bos + prompt.ids[len(prompt.ids) - longest + len(bos) :]
        return replace(prompt, ids=ids, text=self._tokenizer.decode(ids, skip_special_tokens=False))

    def count_image_tokens(self, prompt: Prompt) -> int:
        """Count the tokens of a prompt that stand for its images."""
        return 0 if self._vision is None else self._vision.count_image_tokens(prompt.ids)

    def fingerprint(self) -> str:
        """Hash everything besides the row that a prompt is made of."""
        section = self._section
        parts = [
            section.conversational,
            section.system_prompt,
            dict(section.chat_template_kwargs),
            section.max_prompt_length,
            section.max_prompt_length_policy,
            self._tokenizer.chat_template,
            len(self._tokenizer),
        ]
        return digest(parts if self._vision is None else [*parts, self._vision.chat_template, self._vision.settings])

    def _render(self, row: Mapping[str, Any], uid: PromptId) -> Rendered | Rejected:
        """Turn the prompt column into the text to tokenize."""
        if PROMPT not in row:
            raise missing_prompt(row)
        prompt, where = row[PROMPT], _where(uid)
        if prompt is None:
            return Rejected(reason=NONE)
        if isinstance(prompt, str):
            if not prompt.strip():
                return Rejected(reason=EMPTY)
            return self._render_text(prompt, row, uid)
        if isinstance(prompt, list | tuple):
            return self._render_chat(read_messages(prompt, where=where), row, uid)
        raise DataError(
            f"{where}: prompt is {type(prompt).__name__}; allowed: a string, or a list of messages",
            hint="a message is {role: user, content: ...}; dataset.columns can name another column",
        )

    def _render_text(self, prompt: str, row: Mapping[str, Any], uid: PromptId) -> Rendered | Rejected:
        if self._section.conversational:
            return self._render_chat([{"role": "user", "content": prompt}], row, uid)
        needs_turns = "dataset.system_prompt" if self._section.system_prompt is not None else None
        if self._vision is not None and column_images(row, where=_where(uid)):
            needs_turns = "images"
        if needs_turns is not None:
            raise DataError(
                f"{_where(uid)}: prompt is a string, which has no place for {needs_turns}",
                hint="set dataset.conversational to true, so that it becomes a user message",
            )
        bos = self._tokenizer.bos_token
        special = not (bos and prompt.startswith(bos))
        return Rendered(row=row, uid=uid, text=prompt, messages=None, images=(), add_special_tokens=special)

    def _render_chat(self, turns: list[Message], row: Mapping[str, Any], uid: PromptId) -> Rendered | Rejected:
        where = _where(uid)
        turns, images = self._placed(turns, row, where)
        if all(is_blank(turn) for turn in turns):
            return Rejected(reason=EMPTY)
        template = self._tokenizer.chat_template if self._vision is None else self._vision.chat_template
        if template is None and "chat_template" not in self._section.chat_template_kwargs:
            raise DataError(
                f"{where}: the prompt is a list of messages, but the tokenizer has no chat template",
                hint="name a template file in model.chat_template_path, or use string prompts with dataset.conversational off",
            )
        messages, continued = split_continuation(with_system_prompt(turns, self._section.system_prompt), where=where)
        if any(lacks_content(message) for message in messages):
            return Rejected(reason=NO_CONTENT)
        arguments = {**self._section.chat_template_kwargs, **_template_arguments(row, where)}
        try:
            text = self._apply_template(
                messages, add_generation_prompt=not continued, continue_final_message=continued, **arguments
            )
        except Exception as error:  # a template is a program that comes with the model or the recipe
            raise DataError(f"{where}: the chat template refuses the prompt: {' '.join(str(error).split())}") from error
        return Rendered(
            row=row, uid=uid, text=text, messages=tuple(messages), images=tuple(images), add_special_tokens=False
        )

    def _placed(self, turns: list[Message], row: Mapping[str, Any], where: str) -> tuple[list[Message], Sequence[Any]]:
        """Put a row's images in their places among its turns."""
        if self._vision is not None:
            return place_images(turns, column_images(row, where=where), where=where)
        if any(has_image(turn) for turn in turns):
            raise DataError(
                f"{where}: a message has an image, but no row before it has one",
                hint="give the dataset a column `images`, an empty list in rows without, so that it is known to have some",
            )
        return turns, ()

    def _apply_template(self, messages: Sequence[Message], **arguments: Any) -> str:
        if self._vision is not None:
            return self._vision.render([in_parts(message) for message in messages], **arguments)
        text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)
        return text

    def _with_usable_images(self, rendered: Rendered) -> Prompt | Rejected:
        """Do the same as `_with_images`, or reject the row; the reason is the same for all, and says what the first of them had."""
        try:
            prompt = self._with_images(rendered)
        except DataError as error:
            self._first_unusable = self._first_unusable or error.message
            self._unusable_in_a_row += 1
            if self._unusable_in_a_row >= _MOST_UNUSABLE:
                raise DataError(
                    f"dataset: the images of {self._unusable_in_a_row} rows one after another cannot be used; the last: {error.message}",
                    hint="are the files and addresses within reach? The run goes on from its last checkpoint with --resume",
                ) from error
            return Rejected(
                reason=f"its images cannot be used; the first such row: {self._first_unusable}", of_images=True
            )
        self._unusable_in_a_row = 0
        return prompt

    def _with_images(self, rendered: Rendered) -> Prompt:
        """Open a prompt's images, and tokenize it together with them."""
        assert self._vision is not None, "images are looked for only where something prepares them"
        images = tuple(
            encoded(value, places=self._places, where=self._image(rendered, number))
            for number, value in enumerate(rendered.images, start=1)
        )
        try:
            ids = self._vision.encode(rendered.text, images)
        except DamagedImageError as error:
            place = images.index(error.content)
            where = self._image(rendered, place + 1)
            raise unreadable(rendered.images[place], error.content, error.reason, where=where) from error
        except Exception as error:  # a processor raises whatever it meets first
            raise DataError(
                f"{_where(rendered.uid)}: the model's processor refuses the prompt with {len(images)} image(s): "
                f"{' '.join(str(error).split())}",
                hint="is a token that stands for an image in the prompt's text, or does the chat template leave images out?",
            ) from error
        row = _without_nothing(rendered.row)
        if row.get(IMAGE) is not None:
            row[IMAGE] = images[0]
        else:
            row[IMAGES] = list(images)
        return Prompt(uid=rendered.uid, ids=ids, text=rendered.text, messages=rendered.messages, row=row, images=images)

    def _image(self, rendered: Rendered, number: int) -> str:
        """Name an image in errors, by its row, its place in the prompt and the dataset's own name of its column."""
        value, row = rendered.images[number - 1], rendered.row
        columns = {IMAGE: [row.get(IMAGE)], IMAGES: row.get(IMAGES) or ()}
        column = next((name for name, values in columns.items() if any(one is value for one in values)), PROMPT)
        return f"{_where(rendered.uid)}: image {number} (column `{self._section.columns.get(column, column)}`)"

    def _plain(self, rendered: Rendered, ids: tuple[int, ...]) -> Prompt | Rejected:
        if not ids:
            return Rejected(reason=NO_TOKENS)
        if self._vision is not None and self._vision.count_image_tokens(ids):
            return Rejected(reason=NO_IMAGE)
        row = dict(rendered.row) if self._vision is None else _without_nothing(rendered.row)
        if self._vision is not None and IMAGE not in row:
            row[IMAGES] = []
        return Prompt(uid=rendered.uid, ids=ids, text=rendered.text, messages=rendered.messages, row=row)

    def _tokenize(self, rendered: Sequence[Rendered]) -> list[tuple[int, ...]]:
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


def hint_for(reasons: Iterable[str]) -> str:
    """Say what would help where no row gives a prompt, by the reasons of `Rejected`."""
    if any(TOO_LONG in reason for reason in reasons):
        return "raise dataset.max_prompt_length; model.processor_kwargs can make images smaller"
    return "is `prompt` mapped to the right column in dataset.columns?"


def prompt_id(epoch: int, row: int) -> PromptId:
    """Name a draw of a row."""
    return PromptId(f"{epoch}:{row}")


def _where(uid: PromptId) -> str:
    return f"dataset: row {uid.rpartition(':')[2]}"


def _without_nothing(row: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a row, with None for what stands for no image in its column for one."""
    return {name: None if name == IMAGE and is_nothing(value) else value for name, value in row.items()}


def _template_arguments(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read the row's own template variables; a column of structs has None where a row lacks one."""
    arguments = row.get(TEMPLATE_ARGUMENTS)
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: {TEMPLATE_ARGUMENTS} is {type(arguments).__name__}; allowed: a mapping")
    return {name: value for name, value in arguments.items() if value is not None}
