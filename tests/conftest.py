"""Fixtures shared by all tests."""

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from warm_server import SERVER_MODULES
from warm_start import MODULES, VLLM, WarmStart, warm_start

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Each process with vLLM would compile, for seconds, a function of vLLM's that counts the tokens which are likelier than one.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer, as a plain model folder. Read only."""
    # The process that hands out the tests to others has no use for it, and it takes seconds to import.
    from tiny_models import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the folder of a family's tiny random vision-language model with its processor, made when first asked for. Read only."""
    from tiny_vision_models import build_tiny_vision_model  # most tests need none, and it takes a second to import

    @cache
    def folder(family: str) -> Path:
        return build_tiny_vision_model(tmp_path_factory.mktemp(f"tiny-{family}"), family)

    return folder


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


@pytest.fixture(scope="session")
def warm_server() -> Iterator[WarmStart]:
    """Start `grpo` that starts vLLM servers, without the imports of either; see `warm_server`."""
    with warm_start(SERVER_MODULES) as start:
        yield start


@pytest.fixture(autouse=True)
def forget_the_rewards_module() -> Iterator[None]:
    """Each experiment brings modules of its own, with names that others have; in one process, the next must not find the last one's."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("my_rewards", "unhurried"):
        sys.modules.pop(name, None)


LONGEST = (
    *("test_many_processes", "test_vllm_train", "test_strategies", "test_vllm_recovery", "test_memory_plan"),
    *("test_same_answers", "test_quantized_runs", "test_weight_transfer", "test_served_vllm"),
    *(
        "test_images_in_server",
        "test_images_in_vllm",
        "test_vision_memory_plan",
        "test_colocate_start",
        "test_vllm_images",
    ),
    *("test_vllm_adapter_kinds", "test_one_server", "test_any_shape", "test_adapter_runs", "test_judge_vllm"),
)
"""Files that take more than some ten seconds, the longest first; all of their tests are slow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, so that what they find shows early; then the longest files, so that no worker is left with one at the end."""

    def place(item: pytest.Item) -> tuple[bool, int]:
        is_slow = item.get_closest_marker("slow") is not None
        name = item.path.stem
        return is_slow, LONGEST.index(name) if is_slow and name in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that the tests import becomes garbage: to look for some meanwhile, and ever after, takes a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
