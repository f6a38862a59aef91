"""Real tokenizers and dataset files for the tests of the data stage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from tiny_models import CHAT_TEMPLATE, build_tiny_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from grpo_cli.data.prompts import PromptBuilder
from grpo_cli.recipe.schema import DatasetSection

BOS = "<|endoftext|>"


def build_bos_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a BOS token that it adds itself, and that its chat template writes too, as in Llama 3."""
    tokenizer = build_tiny_tokenizer()
    tokenizer.bos_token = BOS
    tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, ChatML, no BOS."""
    return build_tiny_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizer() -> PreTrainedTokenizerFast:
    """The same with BOS."""
    return build_bos_tokenizer()


@pytest.fixture
def builder(tokenizer: PreTrainedTokenizerFast) -> Callable[..., PromptBuilder]:
    """Make a builder from keys of the recipe's `dataset:`."""

    def make(**keys: Any) -> PromptBuilder:
        return PromptBuilder(keys.pop("tokenizer", tokenizer), DatasetSection(name="rows.jsonl", **keys))

    return make


@pytest.fixture(autouse=True)
def _own_datasets_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets-cache"))


@pytest.fixture(autouse=True)
def _other_working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests start in an empty working folder, so that a relative path is found only where the test put it."""
    folder = tmp_path_factory.mktemp("working")
    monkeypatch.chdir(folder)
    return folder
