"""Rewards that are found from a recipe's folder must not be found by the next test."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forget_what_recipes_imported() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name in {"my_rewards", "multitask"}:
            del sys.modules[name]
