"""What a resumed run compares, so that it does not continue in other data."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from grpo_cli.errors import DataError
from grpo_cli.recipe.kinds import bare


def digest(value: Any) -> str:
    """Hash JSON-like data; bytes, arrays and images in it count by their content, anything else by its type only."""
    text = json.dumps(value, sort_keys=True, default=_content)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content(value: Any) -> str:
    content = value.tobytes() if hasattr(value, "tobytes") else value
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else type(value).__name__


def check_same_dataset(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the fingerprints of two runs, such as `{"rows": 100, "content": "9f2c..."}`.

    Raises:
        DataError: If they differ; it says where.
    """
    changes = [
        f"{name} was {bare(then.get(name))}, is {bare(value)}" for name, value in now.items() if then.get(name) != value
    ]
    if changes:
        raise DataError(
            f"dataset: it is not the one that the checkpoint was made with: {'; '.join(changes)}",
            hint="resume with the dataset and the `dataset:` keys of that run, or start a new run",
        )
