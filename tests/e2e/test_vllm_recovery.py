"""Real vLLM servers that are killed in the middle of a run: it goes on, as if nothing had been; or says in a line why not."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e.experiment import Experiment, completions, records
from e2e.test_vllm_train import (
    ENVIRONMENT,
    make,
    serve,
    train,
    wait_for_steps,
)
from many_processes import start_forked
from optional_packages import needs_vllm
from tiny_models import build_tiny_model
from vllm_server import VllmServer, engine_of, free_port, remaining
from warm_server import SERVE, SERVER_NAME
from warm_start import WarmCommand, WarmStart

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    needs_vllm,
]

STEPS = 30
FEWER_STEPS = 10
MORE = f"train.max_steps={STEPS}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads of a size that vLLM has kernels for."""
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128, initializer_range=0.2)


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory, warm_vllm: WarmStart) -> Path:
    """What a run of as many steps leaves behind, whose engine nobody kills."""
    experiment = make(tmp_path_factory.mktemp("undisturbed"), model, mode="colocate")
    outcome = train(experiment, MORE, warm=warm_vllm)
    assert outcome.returncode == 0, outcome.stderr
    return experiment.output()


def assert_same_samples(mine: Path, theirs: Path, *, steps: int = STEPS) -> None:
    """Every step sampled and rewarded the same, once."""
    told, other = records(mine), records(theirs)
    assert [record["step"] for record in told] == list(range(1, steps + 1))
    assert [record["reward"] for record in told] == pytest.approx([record["reward"] for record in other], abs=1e-6)
    assert [record["num_tokens"] for record in told] == [record["num_tokens"] for record in other]
    assert [record["policy_version"] for record in told] == list(range(steps))
    texts = [
        [[row["completion"] for row in rows] for rows in completions(output).values()] for output in (mine, theirs)
    ]
    assert texts[0] == texts[1]


def recoveries(experiment: Experiment) -> int:
    return sum(record.get("rollout/recoveries", 0) for record in records(experiment.output()))


def server_of(process: WarmCommand) -> psutil.Process:
    """Find the server that a run has started, in whichever of its processes."""
    found = psutil.Process(process.pid).children(recursive=True)
    return next(one for one in found if one.name() == SERVER_NAME)


def offspring_until_the_end(process: WarmCommand, seconds: float = 300) -> list[psutil.Process]:
    """Wait for the end of a run, and list all processes that it had below it meanwhile."""
    found: set[psutil.Process] = set()
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        assert time.monotonic() < deadline, process.told()
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(psutil.Process(process.pid).children(recursive=True))
        time.sleep(0.1)
    return list(found)


def test_a_started_server_is_started_again_and_the_run_is_the_same(
    undisturbed: Path, model: Path, tmp_path: Path, warm_server: WarmStart
) -> None:
    experiment = make(tmp_path, model, mode="server", start=True, server_port=free_port())
    command = ("train", experiment.recipe, MORE)
    process = warm_server.start(*command, environment=ENVIRONMENT, program=SERVE, num_spares=3)
    wait_for_steps(experiment.output(), 2, process)
    offspring = psutil.Process(process.pid).children(recursive=True)
    server_of(process).kill()
    done = len(records(experiment.output()))
    wait_for_steps(experiment.output(), done + 2, process)
    offspring += psutil.Process(process.pid).children(recursive=True)
    engine_of(server_of(process)).kill()
    last = offspring_until_the_end(process)
    output, errors = process.communicate(timeout=0)
    assert process.returncode == 0, errors
    assert "vLLM ended by signal SIGKILL; it is started again" in output
    assert output.count("; it is started again") == 2
    assert_same_samples(experiment.output(), undisturbed)
    assert recoveries(experiment) == 2
    assert (experiment.output() / "vllm-server.1.log").stat().st_size > 0
    assert len(last) >= 2, "the last server, and its engine"
    assert remaining([*offspring, *last]) == []


def test_a_server_of_several_processes_is_started_again(
    model: Path, tmp_path: Path, warm_server: WarmStart, warm_vllm: WarmStart
) -> None:
    """One of them talks to it; all of them wait, and go on with the step that it was lost in."""
    # Fewer steps: two processes add gradients up in another order than one, and after many steps a token falls another way.
    fewer = f"train.max_steps={FEWER_STEPS}"
    undisturbed = make(tmp_path / "undisturbed", model, mode="colocate")
    assert train(undisturbed, fewer, warm=warm_vllm).returncode == 0
    experiment = make(tmp_path / "disturbed", model, mode="server", start=True, server_port=free_port())
    main, other = start_forked(warm_server, 2, "train", experiment.recipe, fewer, program=SERVE, num_spares=2)
    wait_for_steps(experiment.output(), 2, main)
    offspring = psutil.Process(main.pid).children(recursive=True)
    server_of(main).kill()
    last = offspring_until_the_end(main)
    output, errors = main.communicate(timeout=0)
    assert main.returncode == other.wait(timeout=60) == 0, errors
    assert output.count("vLLM ended by signal SIGKILL; it is started again") == 1
    assert_same_samples(experiment.output(), undisturbed.output(), steps=FEWER_STEPS)
    assert recoveries(experiment) == 1
    assert len(last) >= 2, "the last server, and its engine"
    assert remaining([*offspring, *last]) == []


@pytest.fixture(scope="module")
def own_server(model: Path, tmp_path_factory: pytest.TempPathFactory, warm_server: WarmStart) -> Iterator[VllmServer]:
    """A server that no run has started, for two tests; the second one kills it."""
    with serve(tmp_path_factory.mktemp("server"), model, free_port(), warm_server) as server:
        yield server


def test_a_taken_port_and_other_models_are_told_in_a_line(
    own_server: VllmServer, model: Path, tmp_path: Path, warm: WarmStart
) -> None:
    port = own_server.port
    other = build_tiny_model(tmp_path / "other", hidden_size=256, initializer_range=0.2)
    wrong = train(make(tmp_path / "wrong", other, mode="server", server_port=port), warm=warm)
    assert wrong.returncode == 2, wrong.stderr
    assert (
        f"it serves {model}, whose hidden_size is 128; that of {other}, which is trained here, is 256" in wrong.stderr
    )
    precise = train(make(tmp_path / "precise", model, mode="server", server_port=port, dtype="bfloat16"), warm=warm)
    assert precise.returncode == 2, precise.stderr
    assert "it computes in float32, but this run counts on bfloat16 (vllm.dtype)" in precise.stderr
    taken = train(make(tmp_path / "taken", model, mode="server", start=True, server_port=port), warm=warm)
    assert taken.returncode == 4, taken.stderr
    assert f"cannot listen on 127.0.0.1:{port}: address already in use" in taken.stderr
    assert "Traceback" not in wrong.stderr + precise.stderr + taken.stderr
    assert own_server.process.poll() is None


def test_a_server_of_ones_own_is_waited_for_and_the_run_is_the_same(
    own_server: VllmServer, undisturbed: Path, model: Path, tmp_path: Path, warm: WarmStart, warm_server: WarmStart
) -> None:
    """It ends the server that the test before has looked at."""
    port = own_server.port
    experiment = make(tmp_path, model, mode="server", server_port=port)
    process = warm.start("train", experiment.recipe, MORE, environment=ENVIRONMENT)
    wait_for_steps(experiment.output(), 2, process)
    own_server.process.kill()
    time.sleep(5)
    assert process.poll() is None
    with serve(tmp_path, model, port, warm_server) as server:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert "start it again if it has ended: the run goes on when a server answers" in output
        assert f"waiting for vLLM server http://127.0.0.1:{port}: GET /health: connection refused" in output
        assert_same_samples(experiment.output(), undisturbed)
        assert recoveries(experiment) == 1

        given_up = make(tmp_path / "given-up", model, mode="server", server_port=port, server_timeout=3)
        process = warm.start("train", given_up.recipe, "train.max_steps=100000", environment=ENVIRONMENT)
        wait_for_steps(given_up.output(), 2, process)
        server.process.kill()
        began = time.monotonic()
        output, errors = process.communicate(timeout=120)
        assert time.monotonic() - began < 90
    assert process.returncode == 4, errors
    assert "connection refused; waited 3 s (vllm.server_timeout)" in errors
    assert "Traceback" not in errors
    done = records(given_up.output())[-1]["step"]
    assert f"stopped at step {done} of 100000" in output
    assert (given_up.output() / "checkpoints" / f"step-{done:06d}").is_dir()
