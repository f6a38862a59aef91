"""What one request to a served vLLM may ask for, and where."""

from dataclasses import dataclass

MAX_BODY_MIB = 64
"""Unless told otherwise: a bucket travels beside HTTP, so that the longest body is a prompt of some million tokens, or with 48 MiB of images."""
MAX_NUM_GENERATIONS = 256
"""Unless told otherwise, or a recipe needs more."""

AFTER_TEXT = "/v1/completions"
"""Completes a prompt without images: vLLM's own route."""
AFTER_IMAGES = "/grpo/completions"
"""Completes a prompt with images: our route."""

ADAPTER_NAME = "grpo-adapters"
"""What requests name as their model to have completions sampled with the adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much one request may ask for.

    Attributes:
        max_body_bytes: Length of its body.
        max_num_generations: Completions of a prompt, `n`.
    """

    max_body_bytes: int
    max_num_generations: int
