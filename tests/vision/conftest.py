"""Models and processors of every family."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor


@pytest.fixture(scope="session")
def vision_model(vision_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """Give a family's tiny model. Tests do not change its weights."""

    @cache
    def load(family: str) -> Any:
        return AutoModelForImageTextToText.from_pretrained(vision_folder(family)).eval()

    return load


@pytest.fixture(scope="session")
def family_processor(vision_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """Give a family's processor, as transformers loads it."""

    @cache
    def load(family: str) -> Any:
        return AutoProcessor.from_pretrained(vision_folder(family))

    return load
