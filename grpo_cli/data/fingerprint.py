"""What a resumed run compares, so that it does not continue in other data."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from grpo_cli.errors import DataError


def digest(value: Any) -> str:
    """Hash JSON-like data; anything else in it counts by its type only."""
    text = json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_same_dataset(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the fingerprints of two runs, such as `{"rows": 100, "content": "9f2c..."}`.

    Raises:
        DataError: If they differ; it says where.
    """
    changes = [f"{name} was {then.get(name)}, is {value}" for name, value in now.items() if then.get(name) != value]
    if changes:
        raise DataError(
            f"dataset: it is not the one that the checkpoint was made with: {'; '.join(changes)}",
            hint="resume with the dataset and the `dataset:` keys of that run, or start a new run",
        )
