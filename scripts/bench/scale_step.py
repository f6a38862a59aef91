"""A step that nobody sampled: prompts, completions of uneven lengths, rewards and log-probabilities from a seeded generator."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from numpy.random import Generator, default_rng
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from grpo_cli.data.prompts import PromptBuilder
from grpo_cli.recipe.schema import DatasetSection
from grpo_cli.scoring.runtime import Scores
from grpo_cli.types import (
    Completion,
    FinishReason,
    Group,
    PolicyVersion,
    Prompt,
    PromptId,
    Sampling,
    ScoredGroup,
    SyncReport,
)

PROMPTS_PER_RANK = 2
NUM_GENERATIONS = 8
COMPLETION_TOKENS = 128
"""Mean length of a completion. The lengths are spread log-normally, and four times the mean is the longest."""
SAMPLING = Sampling(stop_ids=(), max_tokens=4 * COMPLETION_TOKENS)
REWARDS = ("accuracy", "length")
VOCABULARY = 50_000
DISTINCT_PROMPTS = 10_000
WORDS = tuple(f"word{number}" for number in range(1000))
PROMPT_WORDS = (16, 128)
SPREAD = 0.6
"""Standard deviation of the logarithm of the lengths."""


def prompt_builder() -> PromptBuilder:
    """Make a builder of prompts whose tokens are words."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PromptBuilder(PreTrainedTokenizerFast(tokenizer_object=tokenizer), DatasetSection(name="made up"))


def prompt_rows(count: int) -> Dataset:
    """Make a dataset of `count` rows in little memory: after `DISTINCT_PROMPTS` of them it repeats them."""
    random = default_rng(0)
    lengths = random.integers(*PROMPT_WORDS, size=min(count, DISTINCT_PROMPTS))
    rows = Dataset.from_dict({"prompt": [" ".join(random.choice(WORDS, size=length)) for length in lengths]})
    return concatenate_datasets([rows] * -(-count // len(rows))).take(count)


def made_up_groups(prompts: Sequence[Prompt]) -> list[Group]:
    """Complete prompts: token ids, log-probabilities, and lengths."""
    random = default_rng(len(prompts))
    return [
        Group(prompt=prompt, completions=tuple(_completion(index, random) for index in range(NUM_GENERATIONS)))
        for prompt in prompts
    ]


def _completion(index: int, random: Generator) -> Completion:
    """Make up one completion."""
    wanted = round(random.lognormal(mean=math.log(COMPLETION_TOKENS) - SPREAD**2 / 2, sigma=SPREAD))
    length = min(max(wanted, 1), SAMPLING.max_tokens)
    ids = tuple(random.integers(VOCABULARY, size=length).tolist())
    return Completion(
        index=index,
        ids=ids,
        logps=torch.from_numpy(-random.exponential(size=length).astype("float32")),
        text=f"a text of {length} tokens " * (length // 8),
        finish_reason=FinishReason.STOP if wanted == length else FinishReason.LENGTH,
        policy_version=PolicyVersion(0),
    )


def made_up_scores(groups: Sequence[Group]) -> list[ScoredGroup]:
    """Score groups: a reward of 0 or 1, and one between them that does not always apply."""
    random = default_rng(len(groups))
    shape = (len(groups), NUM_GENERATIONS)
    accuracy = torch.from_numpy(random.integers(2, size=shape).astype("float32"))
    length = torch.from_numpy(random.random(size=shape, dtype="float32"))
    length[length < 0.1] = torch.nan
    rewards = torch.stack([accuracy, length], dim=2)
    return [ScoredGroup(group=group, rewards=one, extras={}) for group, one in zip(groups, rewards, strict=True)]


@dataclass(frozen=True)
class MadeUpEngine:
    """A rollout engine that has the completions already.

    Attributes:
        groups: By the uid of their prompt.
    """

    groups: Mapping[PromptId, Group]
    weight_copies: int = 0

    def generate(self, prompts: Sequence[Prompt], *_: Any, **__: Any) -> list[Group]:
        """Look them up."""
        return [self.groups[prompt.uid] for prompt in prompts]

    def sync(self, *_: Any) -> SyncReport:
        """Take nothing."""
        return SyncReport(version=PolicyVersion(0), bytes=0)

    def rest(self) -> None:
        """Have nothing to give back."""

    def close(self) -> None:
        """Have nothing to release."""


@dataclass(frozen=True)
class MadeUpScorer:
    """A scorer that has the rewards already.

    Attributes:
        scored: Groups with them.
    """

    scored: Sequence[ScoredGroup]
    names: tuple[str, ...] = REWARDS
    descriptions: tuple[str, ...] = ()

    def score(self, groups: Sequence[Group], *_: Any) -> Scores:
        """Give them to the same groups."""
        found = [replace(one, group=group) for one, group in zip(self.scored, groups, strict=True)]
        return Scores(groups=tuple(found), metrics={})
