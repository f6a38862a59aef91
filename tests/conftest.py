"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# After the environment: huggingface_hub reads it when it is imported.
from tiny_models import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer, as a plain model folder. Read only."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-llama"))
