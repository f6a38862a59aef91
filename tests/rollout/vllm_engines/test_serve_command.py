"""`grpo vllm-serve` as a user sees it: what it refuses at once, before vLLM is started."""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from optional_packages import needs_vllm
from vllm_server import free_port

from grpo_cli.cli.app import main
from grpo_cli.cli.serve_plan import ServePlan, serve_plan
from grpo_cli.cli.vllm_serve import served_engine
from grpo_cli.errors import ModelError
from grpo_cli.rollout.vllm.arguments import engine_argument_names

HAS_VLLM = bool(engine_argument_names())
TOKEN = "correct-horse"

RECIPE = """\
model: {name_or_path: missing/model/folder}
dataset: {name: prompts.jsonl, max_prompt_length: 100}
rewards: {reward_funcs: [rewards_here.score]}
vllm: {mode: server, server_port: 8765, token_file: token}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    code: object
    err: str


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Any]:
    """Run the command in this process, in an empty folder; nothing may get as far as vLLM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRPO_VLLM_TOKEN", raising=False)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["grpo", "vllm-serve", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        assert captured.out == ""
        return Outcome(code=caught.value.code, err=captured.err)

    yield run
    assert not list(tmp_path.glob("*.log"))


def test_without_a_model_it_says_what_to_write(refused: Any) -> None:
    outcome = refused()
    assert outcome.code == 2
    assert "--model: is missing (grpo vllm-serve --model MODEL, or grpo vllm-serve RECIPE)" in outcome.err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "node7"])
def test_another_address_wants_a_token(refused: Any, host: str) -> None:
    outcome = refused("--model", "tiny", "--host", host)
    assert outcome.code == 2
    first, _ = outcome.err.split("\n", 1)
    assert f"--host: {host} can be reached from other machines, so a token is needed" in first
    assert "--token-file" in first


@pytest.mark.parametrize("host", ["http://127.0.0.1", "127.0.0.1:8000", "localhost/", "a b", ""])
def test_a_host_is_a_name_or_an_address(refused: Any, host: str) -> None:
    outcome = refused("--model", "tiny", "--host", host)
    assert outcome.code == 2
    assert f'--host: found "{host}"; allowed: a host name or an address' in outcome.err


@pytest.mark.parametrize("option", ["--server-timeout", "--gpu-memory-utilization"])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_number_is_finite(refused: Any, option: str, number: str) -> None:
    outcome = refused("--model", "tiny", option, number)
    assert outcome.code == 2
    assert option in outcome.err


def test_a_taken_port_is_an_error(refused: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = refused("--model", "tiny", "--port", str(port))
    assert outcome.code == 4
    assert f"cannot listen on 127.0.0.1:{port}: address already in use" in outcome.err


def test_a_token_file_that_is_not_there_is_an_error(refused: Any) -> None:
    outcome = refused("--model", "tiny", "--token-file", "none")
    assert outcome.code == 2
    assert 'command line: --token-file: found "none", which does not exist' in outcome.err


def test_a_token_file_for_everybody_is_an_error(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o644)
    outcome = refused("--model", "tiny", "--token-file", "token")
    assert outcome.code == 2
    assert f"(chmod 600 {tmp_path / 'token'})" in outcome.err
    assert TOKEN not in outcome.err


@pytest.mark.parametrize("word", ["max_num_seqs", "=3", "a={"])
def test_an_engine_argument_is_a_key_and_a_value(refused: Any, word: str) -> None:
    outcome = refused("--model", "tiny", "--engine", word)
    assert outcome.code == 2
    assert f"--engine: found '{word}'; allowed: KEY=VALUE" in outcome.err


def test_the_recipes_port_and_token_count_and_options_win(refused: Any, tmp_path: Path) -> None:
    """Neither the rows nor the rewards are there: a machine that samples does not need them."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert 'recipe.yaml: vllm.token_file: found "token", which does not exist' in refused("recipe.yaml").err
    (tmp_path / "token").touch(0o600)
    assert "recipe.yaml: vllm.token_file: found nothing" in refused("recipe.yaml").err
    (tmp_path / "token").write_text(TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f":{port}: address already in use" in refused("recipe.yaml", f"vllm.server_port={port}").err
        assert f":{port}: address already in use" in refused("recipe.yaml", "--port", port).err
    assert "found 0; allowed" in refused("recipe.yaml", "vllm.server_port=0").err


def planned(folder: Path, changes: str = "", *overrides: str, **options: Any) -> ServePlan:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE + changes)
    model, engine = options.pop("model", None), options.pop("engine", [])
    return serve_plan(path, overrides, model, options, engine)


def test_sequences_are_as_long_as_training_or_evaluation_needs(tmp_path: Path) -> None:
    assert planned(tmp_path).vllm.max_model_length == 100 + 256
    evaluated = "eval: {dataset: {name: rows.jsonl, max_prompt_length: 300}, max_completion_length: 1000}\n"
    assert planned(tmp_path, evaluated).vllm.max_model_length == 300 + 1000
    assert planned(tmp_path, evaluated, "generation.max_completion_length=2000").vllm.max_model_length == 100 + 2000
    assert planned(tmp_path, evaluated, "eval.max_completion_length=null").vllm.max_model_length == 300 + 256
    unbounded = "eval: {dataset: {name: rows.jsonl}}\n"
    assert planned(tmp_path, unbounded).vllm.max_model_length is None
    assert planned(tmp_path, unbounded, "vllm.max_model_length=700").vllm.max_model_length == 700
    assert planned(tmp_path, evaluated, max_model_length=400).vllm.max_model_length == 400


def test_completions_of_a_prompt_are_those_of_training_or_of_evaluation(tmp_path: Path) -> None:
    assert planned(tmp_path, "grpo: {num_generations: 12}\n").num_generations == 12
    evaluated = "eval: {dataset: {name: rows.jsonl}, num_generations: 500, temperature: 1}\n"
    assert planned(tmp_path, evaluated).num_generations == 500


def test_a_server_takes_most_of_the_memory_unless_the_recipe_says_how_much(tmp_path: Path) -> None:
    assert planned(tmp_path).vllm.gpu_memory_utilization == 0.9
    assert planned(tmp_path, "", "vllm.gpu_memory_utilization=0.3").vllm.gpu_memory_utilization == 0.3
    assert planned(tmp_path, gpu_memory_utilization=0.5).vllm.gpu_memory_utilization == 0.5


def test_another_model_has_its_own_tokenizer_and_no_revision(tmp_path: Path) -> None:
    changes = ("model.revision=v2", "model.tokenizer_name_or_path=org/tokenizer", "model.trust_remote_code=true")
    own = planned(tmp_path, "", *changes).model
    assert (own.revision, own.tokenizer_name_or_path) == ("v2", "org/tokenizer")
    other = planned(tmp_path, "", *changes, model="org/other").model
    assert (other.name_or_path, other.revision, other.tokenizer_name_or_path) == ("org/other", None, None)
    assert other.trust_remote_code


def test_a_model_that_sees_is_given_images_as_the_recipe_has_them_prepared(
    tmp_path: Path, tiny_model_folder: Path, vision_folder: Callable[[str], Path]
) -> None:
    seeing = f"model.name_or_path={vision_folder('qwen2_5_vl')}"
    options = "model.processor_kwargs={size: {shortest_edge: 64, longest_edge: 256}}"
    found = served_engine(planned(tmp_path, "", seeing, options))
    assert found["limit_mm_per_prompt"] == {"video": 0}
    assert found["mm_processor_kwargs"] == {"size": {"shortest_edge": 64, "longest_edge": 256}}
    alone = served_engine(serve_plan(None, [], str(vision_folder("qwen2_5_vl")), {}, []))
    assert alone["limit_mm_per_prompt"] == {"video": 0}
    assert "mm_processor_kwargs" not in alone
    one = served_engine(serve_plan(None, [], str(vision_folder("qwen2_5_vl")), {}, ["limit_mm_per_prompt={image: 1}"]))
    assert one["limit_mm_per_prompt"] == {"image": 1}
    text = served_engine(planned(tmp_path, "", f"model.name_or_path={tiny_model_folder}"))
    assert "limit_mm_per_prompt" not in text
    with pytest.raises(ModelError, match=r"model\.processor_kwargs: found .* reads text only"):
        served_engine(planned(tmp_path, "", f"model.name_or_path={tiny_model_folder}", options))


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_it_says_how_to_install_it(refused: Any) -> None:
    outcome = refused("--model", "tiny", "--port", str(free_port()))
    assert outcome.code == 4
    assert "pip install vllm" in outcome.err


@needs_vllm
@pytest.mark.parametrize("model", ["./none", "/none/here", "no/such/model", "package://no_such_package/model.gguf"])
def test_a_model_that_is_not_there_is_an_error_at_once(refused: Any, model: str) -> None:
    began = time.monotonic()
    outcome = refused("--model", model, "--port", str(free_port()))
    assert outcome.code == 2
    assert model in outcome.err
    assert time.monotonic() - began < 30


@needs_vllm
def test_a_folder_without_a_model_and_a_misspelled_engine_argument_are_errors_at_once(
    refused: Any, tmp_path: Path, tiny_model_folder: Path
) -> None:
    (tmp_path / "empty").mkdir()
    outcome = refused("--model", "empty", "--port", str(free_port()))
    assert (outcome.code, "has no config.json" in outcome.err) == (2, True)
    outcome = refused("--model", str(tiny_model_folder), "--port", str(free_port()), "--engine", "max_num_seq=3")
    assert (outcome.code, "did you mean `max_num_seqs`?" in outcome.err) == (2, True)
