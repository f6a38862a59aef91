"""What both sides work on: prompts, the completions that they are made to end up with, and how many tokens that is.

Made once from a fixed seed and sent to both, so that they train on the same tokens.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

PROMPT_SPREAD = (1.15, 1.05, 0.95, 0.85)
"""Lengths of the prompts, relative to the shape's. The longest comes first, which is the order that engines like to sort them in."""

LENGTH_DEVIATION = 0.5
"""Standard deviation of the logarithm of completion lengths."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The prompts of one optimizer step and their completions.

    Attributes:
        prompts: P texts.
        prompt_ids: Their tokens.
        completion_ids: For each prompt G completions. Those shorter than the longest end with the end-of-sequence token.
    """

    prompts: list[str]
    prompt_ids: list[list[int]]
    completion_ids: list[list[list[int]]]

    @property
    def rows(self) -> list[list[int]]:
        """All completions, prompt by prompt."""
        return [ids for group in self.completion_ids for ids in group]

    @property
    def longest_completion(self) -> int:
        """Tokens of the longest completion."""
        return max(len(ids) for ids in self.rows)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all completions: each is predicted once."""
        return sum(len(ids) for ids in self.rows)

    @property
    def unique_tokens(self) -> int:
        """Tokens that must go through the model: every prompt once, every completion without its last token."""
        return sum(len(ids) for ids in self.prompt_ids) + self.completion_tokens - len(self.rows)


def make_workload(
    tokenizer: Any, *, prompt_tokens: int, num_generations: int, completion_tokens: tuple[int, int], seed: int = 0
) -> Workload:
    """Make the workload of one shape.

    Completion lengths are log-normal around the geometric mean of the limits and cut there; one completion is as long as allowed.

    Args:
        tokenizer: The model's.
        prompt_tokens: Mean length of the prompts.
        num_generations: Completions per prompt.
        completion_tokens: Shortest and longest completion.
        seed: Of everything random.
    """
    shortest, longest = completion_tokens
    generator = random.Random(seed)
    words = _words(tokenizer, generator)
    prompt_ids = [generator.choices(words, k=round(prompt_tokens * share)) for share in PROMPT_SPREAD]
    prompts = [tokenizer.decode(ids) for ids in prompt_ids]
    for text, ids in zip(prompts, prompt_ids, strict=True):
        if tokenizer(text)["input_ids"] != ids:
            raise ValueError("this tokenizer does not read back the tokens of a text that was made of them")
    lengths = [
        min(
            longest,
            max(shortest, round(math.sqrt(shortest * longest) * math.exp(generator.gauss(0, LENGTH_DEVIATION)))),
        )
        for _ in range(len(prompts) * num_generations)
    ]
    lengths[0] = longest
    rows = [generator.choices(words, k=length) for length in lengths]
    rows = [ids if len(ids) == longest else [*ids[:-1], tokenizer.eos_token_id] for ids in rows]
    groups = [rows[start : start + num_generations] for start in range(0, len(rows), num_generations)]
    return Workload(prompts=prompts, prompt_ids=prompt_ids, completion_ids=groups)


def _words(tokenizer: Any, generator: random.Random) -> list[int]:
    """Find tokens that stay what they are in any company: whole words with their space, or else single letters."""
    vocabulary = sorted(tokenizer.get_vocab().values())
    tried = generator.sample(vocabulary, min(len(vocabulary), 4000))
    texts = {token: tokenizer.decode([token]) for token in tried}
    plain = {token: text for token, text in texts.items() if text.strip().isalpha() and text.isascii()}
    spaced = {token: text for token, text in plain.items() if text.startswith(" ")}
    return [token for token, text in (spaced or plain).items() if tokenizer(text)["input_ids"] == [token]]
