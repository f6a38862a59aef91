"""Commands that start at once."""

from collections.abc import Iterator

import pytest
from warm_start import WarmStart, warm_start


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmStart]:
    """Start `grpo` without its imports; see `warm_start`."""
    with warm_start() as start:
        yield start
