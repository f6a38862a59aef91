"""Commands that start at once."""

import os
from collections.abc import Iterator

import pytest
from warm_start import MODULES, WarmStart, warm_start

VLLM = ("vllm.entrypoints.llm", "vllm.v1.worker.gpu_model_runner", "vllm.model_executor.models.llama")


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmStart]:
    """Start `grpo` without its imports; see `warm_start`."""
    with warm_start() as start:
        yield start


@pytest.fixture(scope="session")
def warm_vllm() -> Iterator[WarmStart]:
    """Start `grpo` with vLLM in the same process, without the imports of either."""
    # vLLM reads it when it is imported; a run has it set by then.
    with warm_start((*MODULES, *VLLM), environment={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}) as start:
        yield start
