"""Fixtures of the rollout tests: loaded models of every family, prompts of different lengths, sampling settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import FAMILIES, build_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.types import Prompt, PromptId, Sampling

END = 257
"""Id of `<|im_end|>` in the tiny models."""

PROMPT_TEXTS = ("Hi", "The quick brown fox jumps", "a b c d e f", "What is seven times six?", "x")


@pytest.fixture(scope="session")
def tokenizer(tiny_model_folder: Path) -> Any:
    """The tiny models' tokenizer: one token per byte."""
    return AutoTokenizer.from_pretrained(tiny_model_folder)


@pytest.fixture(scope="session")
def family_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One loaded tiny model per family. Tests do not change their weights."""
    root = tmp_path_factory.mktemp("families")
    return {
        family: AutoModelForCausalLM.from_pretrained(build_tiny_model(root / family, family)).eval()
        for family in FAMILIES
    }


@pytest.fixture
def model(tiny_model_folder: Path) -> Any:
    """A tiny Llama that the test may change."""
    return AutoModelForCausalLM.from_pretrained(tiny_model_folder).eval()


@pytest.fixture(scope="session")
def prompts(tokenizer: Any) -> list[Prompt]:
    """Five prompts of different lengths."""
    return [
        Prompt(uid=PromptId(f"0:{number}"), ids=tuple(tokenizer(text)["input_ids"]), text=text, messages=None, row={})
        for number, text in enumerate(PROMPT_TEXTS)
    ]


@pytest.fixture(scope="session")
def settings() -> Callable[..., Sampling]:
    """Build sampling settings with the tiny models' stop token and 12 tokens at most."""

    def build(**changes: Any) -> Sampling:
        return Sampling(**{"stop_ids": (END,), "max_tokens": 12, **changes})

    return build
