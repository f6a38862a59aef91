"""Whether model, tokenizer and lengths belong together, before anything is generated."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from grpo_cli.errors import ModelError
from grpo_cli.sharding import whole_shape

TABLE_SLACK = 8
"""Rows that a table of positions may have beyond the model's positions: OPT counts from 2."""


def check_fit(
    model: Any,
    tokenizer: Any,
    *,
    prompt_ids: Sequence[int],
    longest_prompt: int | None,
    max_completion_length: int,
) -> str | None:
    """Compare the tokenizer with the model's embedding, and the longest sequence with the model's positions.

    Args:
        model: A transformers causal language model.
        tokenizer: What prompts are encoded with.
        prompt_ids: A real prompt.
        longest_prompt: Tokens of the longest prompt; None: not known (a stream), completions are looked at alone.
        max_completion_length: Tokens of the longest completion.

    Returns:
        One line of warning when sequences may leave the range that a model without a table of positions was made for.

    Raises:
        ModelError: If the tokenizer has ids that the model has no embedding for, or a sequence may be longer than the model's
            table of positions, or so long that the positions of all others in a batch would be encoded in another way; then not
            knowing the longest prompt is an error as well.
    """
    _check_vocabulary(model, tokenizer, prompt_ids)
    config = model.config.get_text_config()
    longest = (longest_prompt or 0) + max_completion_length
    prompt = "" if longest_prompt is None else f"the longest prompt ({longest_prompt:,}) and "
    found = f"{prompt}generation.max_completion_length ({max_completion_length:,}) make {longest:,} tokens"
    hint = "lower generation.max_completion_length or dataset.max_prompt_length"
    for kind, original in _length_dependent_rotations(config):
        reason = (
            f"beyond {original:,} tokens the model's rotary embedding ({kind}) depends on the longest sequence of a batch, and so "
            "would all log-probabilities"
        )
        if longest > original:
            raise ModelError(f"model.name_or_path: {found}; {reason}", hint=hint)
        if longest_prompt is None:
            raise ModelError(
                f"model.name_or_path: nothing bounds the prompts of the stream; {reason}",
                hint=f"set dataset.max_prompt_length: it and generation.max_completion_length ({max_completion_length:,}) may make "
                f"{original:,} tokens",
            )
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or longest <= positions:
        return None
    found = f"{found}, the model has {positions:,} positions"
    if _has_position_table(model, positions):
        raise ModelError(f"model.name_or_path: {found}", hint=hint)
    return f"{found}: beyond them its answers may be poor"


def _check_vocabulary(model: Any, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
    """Raise if ids that text gives have no embedding.

    Tokens that were added to the vocabulary count only where they are used: text-only Gemma 3 comes with a token for images
    that its embedding does not have.
    """
    rows = whole_shape(model.get_input_embeddings().weight)[0]
    added = set(tokenizer.get_added_vocab().values())
    used = {*prompt_ids, tokenizer.eos_token_id} - {None}
    largest = max(used | (set(tokenizer.get_vocab().values()) - added))
    if largest >= rows:
        raise ModelError(
            f"model.tokenizer_name_or_path: the tokenizer has the token {tokenizer.convert_ids_to_tokens(largest)!r} "
            f"with id {largest:,}, but the model has embeddings for {rows:,} tokens only",
            hint="leave model.tokenizer_name_or_path out to use the model's own tokenizer",
        )


def _length_dependent_rotations(config: Any) -> Iterator[tuple[str, int]]:
    """Give the kind of each rotary embedding whose frequencies depend on the longest position of a call, and the length from which
    on they do (see `dynamic_rope_update` of transformers).

    Models with several kinds of layers may have rotations for each of them.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    for entry in nested or [parameters]:
        kind = str(entry.get("rope_type") or entry.get("type"))
        original = None
        if kind == "longrope":
            original = entry.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
        elif "dynamic" not in kind:
            continue
        original = original or getattr(config, "max_position_embeddings", None)
        if isinstance(original, int):
            yield kind, original


def _has_position_table(model: nn.Module, positions: int) -> bool:
    """Tell whether the model looks positions up in a table of fixed size, learned (GPT-2, OPT) or not (GPT-J)."""
    known = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}  # type: ignore[operator]
    return any(positions <= whole_shape(table)[0] <= positions + TABLE_SLACK for table in _tables(model, known))


def _tables(model: nn.Module, known: set[int]) -> Iterator[Tensor]:
    """Give what may be a table of positions: embeddings other than those known, and matrices named after positions."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module) not in known:
            yield module.weight
    for name, buffer in model.named_buffers():
        if "pos" in name.rpartition(".")[2] and buffer.ndim == 2:
            yield buffer
