"""How much a model's cache holds, by its configuration."""

from typing import Any


def cached_values_per_token(config: Any, *, parts: int = 1) -> int | None:
    """Count the keys and values of a token.

    Args:
        config: Of the text model, as transformers has it.
        parts: Processes that the heads are spread over; those of one of them are counted.

    Returns:
        None for a model without attention heads, which keeps a state of its own kind, and if the configuration does not say.
    """
    layers, heads = positive_integer(config, "num_hidden_layers"), positive_integer(config, "num_attention_heads")
    hidden, head_size = positive_integer(config, "hidden_size"), positive_integer(config, "head_dim")
    if layers is None or heads is None:
        return None
    if head_size is None:
        if hidden is None:
            return None
        head_size = hidden // heads
    cached_heads = positive_integer(config, "num_key_value_heads") or heads
    return (
        2 * layers * max(1, cached_heads // parts) * head_size
    )  # a head is in more than one process rather than in none


def positive_integer(config: Any, name: str) -> int | None:
    """Read a positive integer of a configuration; some families give a list, one number a layer."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None
