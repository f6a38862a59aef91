"""Each experiment brings a `my_rewards.py` of its own; in one process, the next must not find the last one's."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forget_the_rewards_module() -> Iterator[None]:
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("my_rewards", None)
