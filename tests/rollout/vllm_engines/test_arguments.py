"""What vLLM is told: names and values of its arguments, the command line, the token."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from optional_packages import needs_vllm

from grpo_cli import device_memory
from grpo_cli.errors import RecipeError, TrainingError
from grpo_cli.recipe.schema import VllmSection
from grpo_cli.rollout.vllm.arguments import (
    command_line,
    engine_argument_names,
    engine_arguments,
    read_token,
    require_supported,
    resolved_dtype,
    server_arguments,
    vllm_version,
)

HAS_VLLM = bool(engine_argument_names())
noisy_imports = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def arguments(section: VllmSection | None = None, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"model": "folder", "dtype": "float32", "max_model_len": 512, "seed": 7, "on_cpu": False}
    return engine_arguments(section or VllmSection(), **(settings | options))


def test_the_recipe_reaches_vllm_under_its_names_there() -> None:
    section = VllmSection(
        tensor_parallel_size=2,
        data_parallel_size=3,
        gpu_memory_utilization=0.4,
        enable_prefix_caching=False,
        engine={"max-num-seqs": 32},
    )
    found = arguments(section, revision="main", tokenizer="other", trust_remote_code=True)
    assert found == {
        "model": "folder",
        "dtype": "float32",
        "max_model_len": 512,
        "seed": 7,
        "tensor_parallel_size": 2,
        "data_parallel_size": 3,
        "gpu_memory_utilization": 0.4,
        "enable_prefix_caching": False,
        "enable_sleep_mode": False,
        "trust_remote_code": True,
        "revision": "main",
        "tokenizer": "other",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": "grpo_cli.rollout.vllm.worker_extension.WorkerExtension",
        "max_num_seqs": 32,
    }


def test_images_are_prepared_as_the_trainer_does_it_and_videos_get_no_room() -> None:
    assert "limit_mm_per_prompt" not in arguments()
    found = arguments(image_options={"max_pixels": 50_000})
    assert found["limit_mm_per_prompt"] == {"video": 0}
    assert found["mm_processor_kwargs"] == {"max_pixels": 50_000}
    assert found.get("mm_device_do_normalize", False) is False
    assert arguments(VllmSection(engine={"limit_mm_per_prompt": {"image": 1}}), image_options={})[
        "limit_mm_per_prompt"
    ] == {"image": 1}


def test_code_from_a_model_runs_only_if_asked_for() -> None:
    assert arguments()["trust_remote_code"] is False


def test_on_a_cpu_the_cache_is_bounded_in_bytes_shared_by_the_workers_and_free_to_set() -> None:
    one = arguments(on_cpu=True)
    assert 0 < one["kv_cache_memory_bytes"] <= 1 << 30
    assert one["enforce_eager"]
    assert one["enable_chunked_prefill"] is False, "seeded prompts in parts kill vLLM's engine on CPUs"
    four = arguments(VllmSection(tensor_parallel_size=2, data_parallel_size=2), on_cpu=True)
    assert four["kv_cache_memory_bytes"] <= (1 << 30) // 4
    half = arguments(VllmSection(tensor_parallel_size=2), on_cpu=True, sharing_memory=4)
    assert half["kv_cache_memory_bytes"] <= (1 << 30) // 2
    free = arguments(VllmSection(engine={"kv_cache_memory_bytes": 5, "enforce_eager": False}), on_cpu=True)
    assert (free["kv_cache_memory_bytes"], free["enforce_eager"]) == (5, False)
    assert "kv_cache_memory_bytes" not in arguments()


def test_the_cache_takes_half_of_what_a_control_group_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container has less than the machine."""
    group = tmp_path / "groups"
    group.mkdir()
    (tmp_path / "memberships").write_text("0::/\n")
    (group / "memory.max").write_text(f"{3 << 20}\n")
    (group / "memory.current").write_text(f"{1 << 20}\n")
    (group / "memory.stat").write_text("inactive_file 0\n")
    monkeypatch.setattr(device_memory, "MEMBERSHIPS", tmp_path / "memberships")
    monkeypatch.setattr(device_memory, "CONTROL_GROUPS", group)
    found = arguments(VllmSection(gpu_memory_utilization=0.5), on_cpu=True)
    assert found["kv_cache_memory_bytes"] == (2 << 20) // 4
    for size in (1, 2):
        shared = VllmSection(gpu_memory_utilization=0.5, tensor_parallel_size=size)
        each = arguments(shared, on_cpu=True, sharing_memory=4)
        assert each["kv_cache_memory_bytes"] == (2 << 20) // 4 // 4, "each of the training processes takes its share"


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("dtype", "it is `vllm.dtype`"),
        ("max-model-len", "it is `vllm.max_model_length`"),
        ("model", "it is `model.name_or_path`"),
        ("served_model_name", "cannot be set"),
        ("logprobs_mode", "cannot be set"),
        ("weight_transfer_config", "cannot be set"),
        ("worker_extension_cls", "cannot be set"),
    ],
)
def test_an_argument_that_the_recipe_or_training_fixes_is_refused_with_the_reason(argument: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said) as failure:
        arguments(VllmSection(engine={argument: "x", "max_num_seqs": 3}), where="recipe.yaml")
    (problem,) = failure.value.problems
    assert (problem.where, problem.key) == ("recipe.yaml", f"vllm.engine.{argument}")


@needs_vllm
def test_an_unknown_argument_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(RecipeError, match=r"vllm\.engine\.max_num_seq: vLLM [\d.]+ has no .* `max_num_seqs`"):
        arguments(VllmSection(engine={"max_num_seq": 3}))


@needs_vllm
@noisy_imports
@pytest.mark.slow
def test_names_read_from_the_source_are_the_fields_of_vllms_class() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {name for name in AsyncEngineArgs.__dataclass_fields__ if not name.startswith("_")}
    assert engine_argument_names() == fields
    assert set(arguments(revision="main", tokenizer="other", on_cpu=True)) <= fields


@needs_vllm
@noisy_imports
@pytest.mark.slow
def test_vllm_reads_the_command_line_as_it_was_meant() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    section = VllmSection(engine={"max_num_seqs": 32, "hf_overrides": {"a": 1}, "load_format": "dummy"})
    meant = arguments(section, max_model_len=None, on_cpu=True)
    parser = FlexibleArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    words = server_arguments(meant, name="tiny", host="::1", port=8123)
    parsed = parser.parse_args(["serve", *words])
    assert parsed.model_tag == "folder"
    assert parsed.max_model_len == -1
    assert parsed.served_model_name == ["tiny"]
    assert parsed.host == "::1"
    assert parsed.middleware == ["grpo_cli.rollout.vllm.served_process.ServedGate"]
    for name in meant.keys() - {"model", "max_model_len"}:
        assert getattr(parsed, name) == meant[name], name


def test_a_command_line_gives_back_what_was_written() -> None:
    """Read by the standard library, which vLLM's parser builds on."""
    parser = argparse.ArgumentParser()
    for option in ("max-model-len", "name"):
        parser.add_argument(f"--{option}")
    parser.add_argument("--config", type=json.loads)
    parser.add_argument("--many", nargs="+")
    parser.add_argument("--maps", nargs="+", type=json.loads)
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction)
    parser.add_argument("--caching", action=argparse.BooleanOptionalAction)
    values = {
        "max_model_len": -1, "name": "a b --c", "config": {"backend": "grpo"}, "many": ["x", "y"], "eager": True, "caching": False,
        "maps": [{"name": "a b", "on": True}, {"size": None}],
    }  # fmt: skip
    parsed = vars(parser.parse_args(command_line(values | {"left_out": None})))
    assert parsed == values | {"max_model_len": "-1"}


@pytest.mark.parametrize(
    ("asked", "bf16", "model", "computed"),
    [
        ("auto", False, "float32", "float32"),
        ("auto", True, "float32", "bfloat16"),
        ("auto", False, "bfloat16", "bfloat16"),
        ("float32", True, "bfloat16", "float32"),
    ],
)
def test_precision_is_the_trainers_unless_told(asked: Any, bf16: bool, model: str, computed: str) -> None:
    assert resolved_dtype(VllmSection(dtype=asked), bf16=bf16, model_dtype=model) == computed


def write_token(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_token_comes_from_its_file_else_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPO_VLLM_TOKEN", raising=False)
    assert read_token(None, tmp_path) is None
    monkeypatch.setenv("GRPO_VLLM_TOKEN", "")
    assert read_token(None, tmp_path) is None
    monkeypatch.setenv("GRPO_VLLM_TOKEN", "of-environment")
    assert read_token(None, tmp_path) == "of-environment"
    write_token(tmp_path / "token", "of-file\n")
    assert read_token("token", tmp_path) == "of-file"
    assert read_token(str(tmp_path / "token"), Path("elsewhere")) == "of-file"


def test_a_token_file_is_looked_for_beside_the_recipe_then_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, working = tmp_path / "recipes", tmp_path / "working"
    beside.mkdir()
    working.mkdir()
    monkeypatch.chdir(working)
    write_token(working / "token", "of-working-folder")
    assert read_token("token", beside) == "of-working-folder"
    write_token(beside / "token", "of-recipe")
    assert read_token("token", beside) == "of-recipe"


@pytest.mark.parametrize("text", ["", "\n", "two\nlines", "größe", "a\x00b"])
def test_a_token_that_cannot_be_sent_is_refused_without_showing_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_token(tmp_path / "token", text)
    with pytest.raises(RecipeError, match=r"vllm\.token_file: .* one line of printable ASCII") as failure:
        read_token("token", tmp_path)
    assert not text.strip() or text.strip() not in str(failure.value)
    if "\0" not in text and text:
        monkeypatch.setenv("GRPO_VLLM_TOKEN", text)
        with pytest.raises(RecipeError, match=r"^environment: GRPO_VLLM_TOKEN: .* one line of printable ASCII"):
            read_token(None, tmp_path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644])
def test_a_token_file_that_others_can_read_or_change_is_refused_with_the_command_that_mends_it(
    mode: int, tmp_path: Path
) -> None:
    path = write_token(tmp_path / "token", "secret", mode)
    with pytest.raises(RecipeError) as failure:
        read_token("token", tmp_path, where="command line", key="--token-file")
    assert str(failure.value) == (
        'command line: --token-file: found "token", which other users can read or change; allowed: a file for its owner alone '
        f"(chmod 600 {path})"
    )


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r'vllm\.token_file: found "none", which does not exist'):
        read_token("none", tmp_path)


@pytest.mark.parametrize("version", ["0.28.0", "0.28.1rc2.dev3+cpu", "0.32.0", "1.0", "0.1.dev1+g0123456", "dev"])
def test_a_version_that_is_new_enough_or_says_nothing_passes(version: str) -> None:
    require_supported(version)


@pytest.mark.parametrize("version", ["0.27.9", "0.9.1", "0.2.0", "0.27.0rc1.dev5+g0123456.cu129"])
def test_an_older_vllm_is_refused_with_what_is_needed(version: str) -> None:
    with pytest.raises(TrainingError) as failure:
        require_supported(version)
    assert failure.value.message == f"vLLM {version} is installed; allowed: 0.28 or newer"


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_the_error_says_how_to_install_it() -> None:
    with pytest.raises(TrainingError, match="pip install vllm"):
        vllm_version()
