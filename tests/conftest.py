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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, so that what they find shows early."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
