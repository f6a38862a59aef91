"""What keeps vLLM from starting in this process is one line, and leaves the process as it was."""

import logging
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optional_packages import needs_vllm
from tiny_models import build_tiny_model
from torch import distributed
from transformers import AutoModelForCausalLM
from warm_start import VLLM, WarmStart, warm_start

from grpo_cli.errors import ModelError, TrainingError
from grpo_cli.rollout.vllm.colocate import ColocateEngine, _with_bounded_cache
from grpo_cli.rollout.vllm.containment import LOG_LEVEL, Containment

pytestmark = [
    pytest.mark.slow,
    needs_vllm,
]


def test_the_cache_of_a_model_without_attention_heads_is_left_as_it_is(tmp_path: Path) -> None:
    from transformers import MambaConfig

    MambaConfig(hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    arguments = {"model": str(tmp_path), "dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 30}
    assert _with_bounded_cache({**arguments, "max_num_seqs": 2})["kv_cache_memory_bytes"] == 1 << 30


def test_each_part_of_an_engine_has_a_cache_for_its_heads(arguments: dict[str, Any]) -> None:
    """The tiny model has two heads for keys and values, and one in each of four processes that it might be spread over."""
    whole, half, quarter = (
        _with_bounded_cache({**arguments, "max_num_seqs": 2, "tensor_parallel_size": size})["kv_cache_memory_bytes"]
        for size in (1, 2, 4)
    )
    assert whole == 2 * half == 2 * quarter


@pytest.mark.parametrize("family", ["smollm3", "olmo2"])
def test_a_model_for_which_vllm_would_change_transformers_classes_is_refused(
    family: str, arguments: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    folder = build_tiny_model(tmp_path, family, hidden_size=128)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ModelError, match=rf"vLLM would run {folder} .* with transformers' classes") as caught:
        ColocateEngine({**arguments, "model": str(folder)}, tokenizer, bucket_bytes=1, dtype=None, max_num_seqs=1)
    assert "vllm.mode to server" in str(caught.value.hint)
    model(torch.tensor([[1, 2]])).logits.sum().backward()  # training is none the worse for it


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can give memory back")
def test_sleep_is_refused_where_nothing_can_be_given_back(arguments: dict[str, Any], tokenizer: Any) -> None:
    with pytest.raises(TrainingError, match=r"vllm\.enable_sleep_mode: .* on GPUs only; here it runs on cpu"):
        ColocateEngine({**arguments, "enable_sleep_mode": True}, tokenizer, bucket_bytes=1, dtype=None, max_num_seqs=1)


@pytest.mark.parametrize("level", ["INFO", "debug"])
def test_the_level_that_the_user_exported_counts_every_time(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL, level)
    contained = Containment()
    for _ in range(3):
        with contained():
            assert os.environ[LOG_LEVEL] == level
            assert logging.getLogger("vllm").level == getattr(logging, level.upper())
        assert os.environ[LOG_LEVEL] == level


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("vllm.data_parallel_size", 2),
        ("vllm.engine.pipeline_parallel_size", 2),
        ("vllm.engine.distributed_executor_backend", "mp"),
    ],
)
def test_an_engine_with_processes_of_its_own_is_refused(
    key: str, found: object, arguments: dict[str, Any], tokenizer: Any
) -> None:
    wrong = {**arguments, key.rpartition(".")[2]: found}
    with pytest.raises(TrainingError, match=rf"{re.escape(key)}: found {found}; .* in the processes that train"):
        ColocateEngine(wrong, tokenizer, bucket_bytes=1, dtype=None, max_num_seqs=1)


@pytest.fixture
def training_group(tmp_path: Path) -> Iterator[Any]:
    """A process group of one, as training has it."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_parts_of_an_engine_on_cpus_exchange_by_gloo(training_group: Any) -> None:
    """In shared memory, which vLLM prefers where it can, a process waits for ever for one that has ended."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from grpo_cli.rollout.vllm.communicator import exchange_by_gloo

    def communicator() -> Any:
        return resolve_obj_by_qualname(current_platform.get_device_communicator_cls())

    with exchange_by_gloo():
        made = communicator()(cpu_group=training_group, device_group=training_group, unique_name="tp:0")
    assert made.dist_module is distributed
    assert communicator() is CpuCommunicator


@pytest.fixture(scope="module")
def imported_vllm() -> Iterator[WarmStart]:
    """Start programs that have imported vLLM, which would log all that it does."""
    with warm_start(("grpo_cli.rollout.vllm.colocate", *VLLM)) as start:
        yield start


@pytest.mark.parametrize("grouped", [False, True], ids=["no process group", "training's process group"])
def test_process_groups_are_those_of_training_after_a_start_that_failed_and_after_the_end(
    grouped: bool, folder: Path, imported_vllm: WarmStart
) -> None:
    script = f"""
        import sys
        import warnings
        import torch
        from torch import distributed
        from transformers import AutoTokenizer
        from grpo_cli.errors import ModelError
        from grpo_cli.rollout.vllm.colocate import ColocateEngine

        warnings.simplefilter("error")
        if {grouped}:
            distributed.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
            own = distributed.new_group([0])

        def start(**changes):
            arguments = dict(model={str(folder)!r}, dtype="float32", max_model_len=64, enforce_eager=True,
                             kv_cache_memory_bytes=1 << 20, logprobs_mode="processed_logprobs") | changes
            tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})
            return ColocateEngine(arguments, tokenizer, bucket_bytes=1 << 18, dtype=None, max_num_seqs=2)

        def check():
            assert distributed.is_initialized() == {grouped}
            if {grouped}:
                distributed.all_reduce(torch.ones(1))
                distributed.all_reduce(torch.ones(1), group=own)

        try:
            start(kv_cache_memory_bytes=100)
        except ModelError as error:
            assert "\\n" not in error.message, error.message
            print(error)
        else:
            sys.exit("it has started")
        check()
        for _ in range(2):
            engine = start()
            engine.close()
            engine.close()
            check()
    """
    done = imported_vllm.run(program=textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"vLLM does not start with {folder}: ")
    assert len(done.stdout.splitlines()) == 1, done.stdout  # and nothing of what vLLM logs
