"""A sequence-classification model with one label, as a reward."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from grpo_cli.errors import ModelError
from grpo_cli.hub import stay_offline_without_network

_UNLIMITED = 10**9
"""Tokenizers that know no limit name a far larger one."""


class RewardModel:
    """Scores prompt and completion together with a classifier's single logit.

    A conversation goes through the tokenizer's chat template, which brings its own special tokens. Plain text is the prompt and
    the completion joined, tokenized as the tokenizer does by default: an encoder needs its `[CLS]`.

    Completions are sorted by length for little padding, and padded on the right. A completion's score depends on its
    neighbours in a batch no more than by rounding.

    Args:
        model: With one label.
        tokenizer: Its own.
        batch_size: Completions in one forward.
        max_length: Longer inputs are cut on the tokenizer's truncation side; None: the tokenizer's own limit, if it has one.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch_size: int, max_length: int | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        limit = max_length or tokenizer.model_max_length
        self._truncation = {"truncation": True, "max_length": limit} if limit < _UNLIMITED else {"truncation": False}
        self._device = next(model.parameters()).device
        self._pad_id = tokenizer.pad_token_id
        if self._pad_id is None:
            self._pad_id = model.config.pad_token_id

    def __call__(self, *, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Score completions.

        Args:
            prompts: Strings, or lists of messages.
            completions: Strings, or lists with one assistant message.

        Returns:
            One logit each.
        """
        inputs = [self._ids(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
        rewards = [0.0] * len(inputs)
        for start in range(0, len(order), self._batch_size):
            indices = order[start : start + self._batch_size]
            scores = self._forward([inputs[index] for index in indices])
            for index, score in zip(indices, scores.tolist(), strict=True):
                rewards[index] = score
        return rewards

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(completion, str):
            return list(self._tokenizer(prompt + completion, **self._truncation)["input_ids"])
        text = self._tokenizer.apply_chat_template(_conversation(prompt, completion), tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False, **self._truncation)["input_ids"])

    @torch.inference_mode()
    def _forward(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        pad_id = self._pad_id if self._pad_id is not None else self._unused_id(inputs)
        width = max(len(ids) for ids in inputs)
        input_ids = torch.tensor([[*ids, *[pad_id] * (width - len(ids))] for ids in inputs], device=self._device)
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in inputs], device=self._device)
        # Decoder classifiers read the score at the last token that is not this id.
        self._model.config.get_text_config().pad_token_id = pad_id
        return self._model(input_ids=input_ids, attention_mask=mask).logits[:, 0].float()  # type: ignore[no-any-return]

    def _unused_id(self, inputs: Sequence[Sequence[int]]) -> int:
        """Pick a padding id where the tokenizer has none.

        It is one that the inputs do not use: an end token would be taken for padding where a completion ends in it.
        """
        used = {token for ids in inputs for token in ids}
        return next(token for token in range(self._model.get_input_embeddings().num_embeddings) if token not in used)


def load_reward_model(
    name: str,
    *,
    folder: Path,
    device: torch.device | str,
    batch_size: int = 16,
    max_length: int | None = None,
    trust_remote_code: bool = False,
) -> RewardModel:
    """Load a reward model and its tokenizer, in the checkpoint's own precision.

    Args:
        name: Hub id, or a local folder, relative to the recipe's folder or the working folder.
        folder: The recipe's.
        device: Where it runs.
        batch_size: Completions in one forward.
        max_length: Tokens after which its input is cut.
        trust_remote_code: Whether a hub model may bring its own code.

    Raises:
        ModelError: If it does not load or has another number of labels than one.
    """
    local = folder / name
    if not local.is_dir():
        stay_offline_without_network()
    source = str(local) if local.is_dir() else name
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        if config.num_labels != 1:
            raise ModelError(
                f"reward model {name}: it has {config.num_labels} labels; allowed is 1",
                hint="a reward model is a sequence-classification model with one output, not a language model",
            )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        model = AutoModelForSequenceClassification.from_pretrained(
            source, config=config, dtype="auto", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"reward model {name}: cannot load it: {reason}",
            hint="a hub id or a local folder of a sequence-classification model; gated models need `hf auth login`",
        ) from error
    model.to(device).eval().requires_grad_(False)
    return RewardModel(model, tokenizer, batch_size=batch_size, max_length=max_length)


def _conversation(
    prompt: Sequence[Mapping[str, Any]], completion: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Join the messages; a completion that continued an assistant turn is one message with it. Of parts only texts count."""
    turns = [{**message, "content": _text(message["content"])} for message in prompt]
    last, first = turns[-1], completion[0]
    if last["role"] != "assistant":
        return [*turns, *completion]
    return [*turns[:-1], {**last, "content": last["content"] + first["content"]}, *completion[1:]]


def _text(content: Any) -> Any:
    """Put the texts of a list of parts together: a model that reads text only does not see the others."""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list | tuple) else content
