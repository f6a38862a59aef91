"""`grpo train` with a real vLLM that samples: in the process, in a server that runs already, and in one that the run starts.

They are the tests of what only the whole shows: weights that reach an engine of another process and are seen to, servers that die,
and nothing that is left behind.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.experiment import Experiment, completions, make_experiment, records, weights
from many_processes import Launched, assert_close, overrides, run_forked, train_in_forked
from optional_packages import needs_vllm
from tiny_models import build_tiny_model
from vllm_server import VllmServer, free_port
from warm_start import GRPO as GRPO_PROGRAM
from warm_start import WarmCommand, WarmStart

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    needs_vllm,
]

GRPO = [sys.executable, "-m", "grpo_cli"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
STEPS = 6
ADAPTERS = ("model.lora.r=4", "train.learning_rate=0.05")
ROUNDED = (*ADAPTERS, "model.quantization=4bit", "grpo.beta=0.01")
"""With a reference, completions that were rewarded alike are looked at, too."""

LIE = """
from grpo_cli.rollout.sync import names

FIRST, SECOND = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))


class Lie:
    def __init__(self, named):
        self.named = named

    def __iter__(self):
        for name, tensor in self.named:
            yield {FIRST: SECOND, SECOND: FIRST}.get(name, name), tensor


def lie():
    names.checkpoint_names = lambda model, named: Lie(named)
"""
"""Sends two matrices under each other's name: what arrives is what was sent, and still it is wrong."""
LYING = f"""
{LIE}
lie()
{GRPO_PROGRAM}
"""
LYING_IN_ONE_OF_TWO = f"""
from grpo_cli.errors import TrainingError
{LIE}
assert os.environ["LOCAL_WORLD_SIZE"] == "2", "vLLM writes its own there"
if os.environ["RANK"] == "1":
    lie()
for size in (1, 2):
    try:
        run(load_recipe(Path(recipe), [*overrides, f"vllm.tensor_parallel_size={{size}}", f"train.output_dir={{recipe}}-lied"]))
    except TrainingError as error:
        assert "does not sample from the trained weights" in error.message, error
    else:
        sys.exit("nobody has noticed")
"""
"""After other runs, with the last one's settings: the other process's engine has the wrong weights, or its part of the only one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads of a size that vLLM has kernels for."""
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128, initializer_range=0.2)


def make(folder: Path, model: Path, **vllm: Any) -> Experiment:
    return make_experiment(
        folder,
        model,
        rewards={"reward_funcs": ["my_rewards.few_letters"]},
        generation={"max_completion_length": 12},
        vllm={"canary_steps": 2, "engine": {"kv_cache_memory_bytes": 1 << 26}, **vllm},
    )


def train(experiment: Experiment, *arguments: str, warm: WarmStart | None = None) -> subprocess.CompletedProcess[str]:
    """Run `grpo train` to its end, forked, or from scratch with all that users have."""
    if warm is not None:
        return warm.run("train", experiment.recipe, *arguments, environment=ENVIRONMENT)
    return subprocess.run(
        [*GRPO, "train", str(experiment.recipe), *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "0"},
        check=False,
        timeout=300,
    )


def wait_for_steps(
    output: Path, steps: int, process: subprocess.Popen[str] | WarmCommand, seconds: float = 240
) -> None:
    """Wait until a run has done some steps."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if (output / "metrics.jsonl").exists() and len(records(output)) >= steps:
            return
        time.sleep(0.05)
    raise AssertionError(f"the run did not come so far: {process.communicate(timeout=10)}")


def assert_vllm_sampled(experiment: Experiment, steps: int = STEPS, *, output: str = "run") -> None:
    """Look at what a run with vLLM tells of it."""
    told = [
        record for record in records(experiment.output(output)) if "policy_version" in record
    ]  # the others are evaluations
    assert [record["step"] for record in told] == list(range(1, steps + 1))
    size = sum(tensor.nbytes for tensor in weights(experiment.output(output)).values())
    for record in told:
        assert record["sync/bytes"] >= size
        assert 0 < record["sampling/logp_difference/mean"] < 1e-4, "another engine, the same weights"
        assert record["sampling/logp_difference/max"] < 2e-3
        assert record["sampling/importance_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert record["sampling/importance_ratio/clipped_mean"] == pytest.approx(1, abs=1e-3)
        assert record["policy_version"] == record["step"] - 1
    checks = [record["canary/logp_difference/mean"] for record in told if "canary/logp_difference/mean" in record]
    assert len(checks) >= steps // 2
    assert all(0 < check < 1e-4 for check in checks)


def assert_adapters_were_sent(experiment: Experiment, output: str = "run", steps: int = STEPS) -> None:
    """All weights once, then only the adapters; the canary, in every second step, saw that they were the trainer's."""
    told = [record for record in records(experiment.output(output)) if "loss" in record]
    assert len(told) == steps
    adapters = sum(tensor.nbytes for tensor in weights(experiment.output(output)).values())
    sizes = [record["sync/bytes"] for record in told]
    assert sizes[0] > 10 * adapters
    assert all(adapters <= size < 1.1 * adapters + 4096 for size in sizes[1:])
    assert all(0 < record["sampling/logp_difference/mean"] < 1e-4 for record in told)
    changed = [record["canary/logp_difference/mean"] for record in told if "canary/logp_difference/mean" in record]
    assert len(changed) >= steps // 2


def assert_merged_weights_were_sent(experiment: Experiment, steps: int = STEPS) -> None:
    """All weights before every step; the samples, and the canary, were of them."""
    told = [record for record in records(experiment.output()) if "loss" in record]
    assert len(told) == steps
    assert len({record["sync/bytes"] for record in told}) == 1
    assert all(0 < record["sampling/logp_difference/mean"] < 1e-4 for record in told)
    assert sum("canary/logp_difference/mean" in record for record in told) >= steps // 2


@pytest.fixture(scope="module")
def colocated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, str]:
    """A complete run with vLLM in its process, and what it printed."""
    experiment = make(tmp_path_factory.mktemp("colocated"), model, mode="colocate")
    outcome = train(experiment)
    assert outcome.returncode == 0, outcome.stderr
    return experiment, outcome.stdout


def test_vllm_samples_in_the_process_that_trains(colocated: tuple[Experiment, str]) -> None:
    experiment, output = colocated
    assert_vllm_sampled(experiment)
    assert "  engine    vLLM in this process" in output


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_sampled_with(merged: bool, model: Path, tmp_path: Path, warm_vllm: WarmStart) -> None:
    experiment = make(tmp_path, model, mode="colocate", merge_adapters=merged)
    outcome = train(experiment, *ADAPTERS, "grpo.beta=0.01", warm=warm_vllm)
    assert outcome.returncode == 0, outcome.stderr
    if not merged:
        assert_adapters_were_sent(experiment)
        return
    assert_merged_weights_were_sent(experiment)
    assert records(experiment.output())[-1]["kl"] > 0


def test_products_in_bfloat16_are_taken_for_rounding(model: Path, tmp_path: Path, warm_vllm: WarmStart) -> None:
    """vLLM has the weights as floats, and multiplies in float32: more than float32 allows, and less than wrong weights would show."""
    experiment = make(tmp_path, model, mode="colocate")
    outcome = train(experiment, *ROUNDED, "model.bnb_4bit_compute_dtype=bfloat16", "train.max_steps=2", warm=warm_vllm)
    assert outcome.returncode == 0, outcome.stderr
    assert "LlamaForCausalLM: " not in outcome.stdout, "which a notice of a slower way begins with"
    assert 0.001 < records(experiment.output())[0]["sampling/logp_difference/mean"] < 0.1


def test_the_last_of_the_weights_are_sampled_from(colocated: tuple[Experiment, str]) -> None:
    """The run learns: with the weights of the beginning, the reward would stay where it was."""
    told = records(colocated[0].output())
    assert len({record["policy_version"] for record in told}) == STEPS
    first = completions(colocated[0].output())
    assert len({str(rows) for rows in first.values()}) == STEPS


def test_weights_under_wrong_names_stop_the_run_before_it_trains(
    model: Path, tmp_path: Path, warm_vllm: WarmStart
) -> None:
    experiment = make(tmp_path, model, mode="colocate")
    outcome = warm_vllm.run("train", experiment.recipe, environment=ENVIRONMENT, program=LYING)
    assert outcome.returncode == 4, outcome.stderr
    assert "does not sample from the trained weights" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not (experiment.output() / "metrics.jsonl").exists()


def serve(folder: Path, model: Path, port: int, warm: WarmStart) -> VllmServer:
    """Start `grpo vllm-serve`, which ends with the block."""
    engine = (f"kv_cache_memory_bytes={1 << 26}", "enable_lora=true", "max_lora_rank=8")
    options = ("--max-model-length", "128", *(word for one in engine for word in ("--engine", one)))
    return VllmServer(folder, model, *options, token=None, port=port, warm=warm)


def test_runs_attach_to_a_server_one_after_another(
    colocated: tuple[Experiment, str], model: Path, tmp_path: Path, warm: WarmStart, warm_server: WarmStart
) -> None:
    """The first waits for it, and is killed in the middle without a word; the second goes on with the same one, then one in two processes.

    The last ones train adapters: they send them alone, also where the weights below are in 4 bits, or merged into what those became.
    """
    port = free_port()
    experiment = make(tmp_path, model, mode="server", server_port=port)
    process = warm.start("train", experiment.recipe, "train.save_steps=1", environment=ENVIRONMENT)
    while f"waiting for vLLM server http://127.0.0.1:{port}" not in process.told()[0]:
        assert process.poll() is None, process.told()
        time.sleep(0.1)
    with serve(tmp_path, model, port, warm_server):
        wait_for_steps(experiment.output(), 2, process)
        process.kill()
        output, _ = process.communicate(timeout=60)
        assert f"  engine    vLLM server http://127.0.0.1:{port}\n" in output
        outcome = train(experiment, "--resume", warm=warm)
        assert outcome.returncode == 0, outcome.stderr
        two = make(tmp_path / "two", model, mode="server", server_port=port)
        codes, _, errors = run_forked(warm, 2, "train", two.recipe)
        assert codes == [0, 0], errors
        adapted = make(tmp_path / "adapted", model, mode="server", server_port=port)
        outcome = train(adapted, *ADAPTERS, warm=warm)
        assert outcome.returncode == 0, outcome.stderr
        rounded = make(tmp_path / "rounded", model, mode="server", server_port=port)
        outcome = train(rounded, *ROUNDED, warm=warm)
        assert outcome.returncode == 0, outcome.stderr
        merged = make(tmp_path / "merged", model, mode="server", server_port=port, merge_adapters=True)
        outcome = train(merged, *ROUNDED, warm=warm)
        assert outcome.returncode == 0, outcome.stderr
    assert_adapters_were_sent(adapted)
    assert_adapters_were_sent(rounded)
    assert_merged_weights_were_sent(merged)
    for one in (experiment, two):
        assert_vllm_sampled(one)
        mine, other = weights(one.output()), weights(colocated[0].output())
        for name, tensor in mine.items():
            torch.testing.assert_close(
                tensor, other[name], atol=1e-3, rtol=0, msg=f"{name}: the same run in another mode"
            )


MANY: dict[str, object] = {
    "train.prompts_per_step": 3,  # not the same number for each of two
    "train.max_steps": 3,
    "train.learning_rate": 0.001,
    "grpo.num_generations": 3,
    "eval.dataset.name": "data.jsonl",
    "eval.temperature": 0,
}
"""Samples and greedy completions, in a run whose steps do not make the most of rounding."""


@pytest.fixture(scope="module")
def many(model: Path, tmp_path_factory: pytest.TempPathFactory, warm_vllm: WarmStart) -> Experiment:
    """A run with an engine in its process, and with engines in and over two processes, which then are lied to."""
    experiment = make(tmp_path_factory.mktemp("many"), model, mode="colocate")
    alone = overrides({**MANY, "train.output_dir": experiment.output("alone")})
    outcome = train(experiment, *alone, warm=warm_vllm)
    assert outcome.returncode == 0, outcome.stderr
    adapted = {"model.lora.r": 4, "vllm.tensor_parallel_size": 2, "train.output_dir": experiment.output("adapted")}
    jobs = [
        {**MANY, **adapted},
        *(
            {**MANY, "train.output_dir": experiment.output(str(size)), "vllm.tensor_parallel_size": size}
            for size in (1, 2)
        ),
    ]
    train_in_forked(warm_vllm, 2, [(experiment.recipe, job, None) for job in jobs], afterwards=LYING_IN_ONE_OF_TWO)
    return experiment


@pytest.mark.parametrize("size", [1, 2])
def test_engines_in_and_over_processes_sample_as_one_does(many: Experiment, size: int) -> None:
    assert_vllm_sampled(many, 3, output=str(size))
    assert_close(many.output(str(size)), many.output("alone"), but=("sampling/", "canary/"), atol=1e-4)


def test_adapters_are_sampled_with_by_an_engine_over_two_processes(many: Experiment) -> None:
    assert_adapters_were_sent(many, output="adapted", steps=3)


def test_wrong_weights_of_another_process_stop_the_run(many: Experiment) -> None:
    """The fixture has seen it in both processes; each of two engines, and each part of one, is looked at."""
    assert not Path(f"{many.recipe}-lied").exists()


def test_processes_that_an_engine_cannot_be_spread_over_are_refused_in_one_line(
    many: Experiment, warm: WarmStart
) -> None:
    launched = Launched(many, "odd", "vllm.tensor_parallel_size=2", count=3, warm=warm)
    code, _, errors = launched.end()
    assert code == 4
    assert errors == (
        "error: vllm.tensor_parallel_size: found 2, but this run has 3 processes, which vllm.mode: colocate spreads each engine over; "
        "allowed: 1, 3\n  hint: start it with --nproc 2, or a multiple of 2\n"
    )


@pytest.fixture
def endless(many: Experiment, request: pytest.FixtureRequest, warm_vllm: WarmStart) -> Launched:
    """A run that does not end by itself in two processes that share an engine, and sample nearly all the time."""
    changes = {"vllm.tensor_parallel_size": 2, "generation.max_completion_length": 100, "train.max_steps": 100_000}
    launched = Launched(many, request.node.name, "train.save_steps=1", *overrides(changes), warm=warm_vllm)
    launched.wait_for_steps(2)
    time.sleep(0.5)  # into the next sample
    return launched


def test_a_killed_process_ends_the_one_that_shares_its_engine(endless: Launched) -> None:
    workers = endless.workers()
    workers[1].kill()
    began = time.monotonic()
    code, output, errors = endless.end()
    # At once as a rule. But a send of gloo's that meets the end of the other process may wait for ever, and then nothing that is written
    # in Python hears the launcher's SIGTERM: it kills after 30 seconds.
    assert time.monotonic() - began < 45
    assert code == 137, (output, errors)
    assert not any(worker.is_running() for worker in workers.values())
    assert "process 1 was killed by SIGKILL" in errors
    assert not {"Traceback", "Dumping"} & set(errors.split()), "vLLM would tell all of its settings"


def test_a_signal_ends_processes_that_share_an_engine(endless: Launched) -> None:
    workers = endless.workers()
    endless.process.send_signal(signal.SIGTERM)
    code, output, errors = endless.end()
    assert code == 143, (output, errors)
    assert not any(worker.is_running() for worker in workers.values())
    assert errors.count("stopped by SIGTERM") == 1
    assert not {"Traceback", "Dumping"} & set(errors.split())
