"""How a rollout is drawn: sampling settings from the recipe, what ends a completion, and the seed of every sample."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from grpo_cli.errors import ModelError
from grpo_cli.recipe.schema import EvalSection, GenerationSection
from grpo_cli.types import Sampling


def training_sampling(
    generation: GenerationSection,
    *,
    stop_ids: tuple[int, ...],
    banned_ids: tuple[int, ...] = (),
    regex: str | None = None,
) -> Sampling:
    """Sampling settings of training rollouts.

    Args:
        generation: The recipe's `generation` section.
        stop_ids: From `stop_token_ids`.
        banned_ids: Tokens that no completion may have.
        regex: The recipe's `vllm.structured_outputs_regex`.
    """
    return Sampling(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        repetition_penalty=generation.repetition_penalty,
        stop_ids=stop_ids,
        stop_strings=tuple(generation.stop),
        min_tokens=generation.min_completion_length,
        max_tokens=generation.max_completion_length,
        banned_ids=banned_ids,
        regex=regex,
    )


def evaluation_sampling(
    evaluation: EvalSection,
    generation: GenerationSection,
    *,
    stop_ids: tuple[int, ...],
    banned_ids: tuple[int, ...] = (),
    regex: str | None = None,
) -> Sampling:
    """Sampling settings of evaluation rollouts: `eval`'s own, and for the rest those of training.

    Args:
        evaluation: The recipe's `eval` section.
        generation: The recipe's `generation` section; gives the stop strings and the lengths that `eval` leaves out.
        stop_ids: From `stop_token_ids`.
        banned_ids: Tokens that no completion may have.
        regex: The recipe's `vllm.structured_outputs_regex`.
    """
    max_tokens = evaluation.max_completion_length or generation.max_completion_length
    return Sampling(
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
        min_p=evaluation.min_p,
        repetition_penalty=evaluation.repetition_penalty,
        stop_ids=stop_ids,
        stop_strings=tuple(generation.stop),
        min_tokens=min(generation.min_completion_length, max_tokens),
        max_tokens=max_tokens,
        banned_ids=banned_ids,
        regex=regex,
    )


def stop_token_ids(
    tokenizer: Any, generation_config: Any, extra: Iterable[int] = (), *, model_config: Any = None
) -> tuple[int, ...]:
    """Collect every token that ends a completion.

    They are often scattered: a base model's tokenizer names `<|endoftext|>` while its chat template closes turns with
    `<|im_end|>`, and only the generation config lists both. Missing one lets completions run on to the length limit.

    Args:
        tokenizer: Its end-of-sequence token counts, and the token with which its chat template closes an assistant turn.
        generation_config: A transformers generation config, or None; its `eos_token_id` may be one id or a list.
        extra: The recipe's `generation.stop_token_ids`.
        model_config: A transformers model config, or None.

    Returns:
        Ids in ascending order; at least one.

    Raises:
        ModelError: If there is none, or one of `extra` is no token of the tokenizer.
    """
    named = tuple(extra)
    unknown = [token for token in named if not 0 <= token < len(tokenizer)]
    if unknown:
        raise ModelError(
            f"generation.stop_token_ids: {unknown[0]} is no token; this tokenizer's ids are 0 to {len(tokenizer) - 1}"
        )
    stops = {*named, *_ids(tokenizer.eos_token_id), *_ids(_chat_end_id(tokenizer))}
    text_config = None if model_config is None else model_config.get_text_config()
    for config in (generation_config, model_config, text_config):
        stops.update(_ids(getattr(config, "eos_token_id", None)))
    if not stops:
        raise ModelError(
            "nothing can end a completion: neither tokenizer, chat template nor model name an end-of-sequence token",
            hint="name one in generation.stop_token_ids",
        )
    return tuple(sorted(stops))


def _ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    """Spell an optional id or list of ids as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _chat_end_id(tokenizer: Any) -> int | None:
    """Find the special token that follows the content of an assistant turn; None if there is no such thing."""
    if tokenizer.chat_template is None:
        return None
    from jinja2 import TemplateError  # noqa: PLC0415  present exactly when chat templates can be rendered

    content = "completed"
    turns = [{"role": "user", "content": "request"}, {"role": "assistant", "content": content}]
    try:
        rendered: str = tokenizer.apply_chat_template(turns, tokenize=False)
    except TemplateError:  # some templates refuse a dialogue this plain; data preparation reports those it needs
        return None
    following = tokenizer(rendered.rpartition(content)[2], add_special_tokens=False)["input_ids"]
    first = following[0] if following else None
    added = tokenizer.added_tokens_decoder
    return first if first in added and added[first].special else None


def sample_seed(key: tuple[int | str, ...], uid: str, index: int) -> int:
    """Derive the seed of one sample. It is the same in every process, on every platform, in every batch.

    Args:
        key: What seeds the rollout, such as (run seed, "train", step).
        uid: The prompt's.
        index: The sample's index in its group.

    Returns:
        63 bits, uniform.
    """
    # JSON tells 1 from "1" and keeps neighbours apart, which joining strings would not.
    message = json.dumps([list(key), uid, index], separators=(",", ":")).encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "big") >> 1
