"""Runs whose weights, gradients and optimizer states are cut into parts: stopped, killed, resumed, and told what is wrong."""

import json
import signal
from pathlib import Path

import pytest
import torch
from e2e.experiment import Experiment, make_experiment, records, weights
from many_processes import Job, Launched, assert_close, overrides, run_forked, start_forked, train_in_forked
from safetensors.torch import load_file
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM
from warm_start import WarmStart

from grpo_cli.engine.run import run
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ZERO_CONFIG = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}}
"""Otherwise parameters as small as these would stay whole."""

ENDLESS = ("train.max_steps=100000", "distributed.strategy=deepspeed_zero3")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Experiment:
    made = make_experiment(
        tmp_path_factory.mktemp("experiment"),
        tiny_model_folder,
        grpo={"num_generations": 3},
        generation={"max_completion_length": 10},
        train={"prompts_per_step": 3, "max_steps": 5, "learning_rate": 0.001},
    )
    (made.folder / "zero.json").write_text(json.dumps(ZERO_CONFIG))
    return made


def settings(strategy: str) -> dict[str, object]:
    if not strategy.startswith("deepspeed"):
        return {"distributed.strategy": strategy}
    return {"distributed.strategy": strategy, "distributed.deepspeed_config": "zero.json"}


MOVING: dict[str, object] = {
    "grpo.num_iterations": 2,
    "train.weight_decay": 0.1,
    "grpo.beta": 0.1,
    "grpo.sync_ref_model": True,
    "grpo.ref_model_sync_steps": 2,
}
"""A window that is open at the checkpoint, and a reference that has moved."""


def test_a_checkpoint_is_that_of_any_strategy_and_any_number_of_processes(
    experiment: Experiment, warm: WarmStart
) -> None:
    def job(strategy: str, output: str, begins: str | None = None) -> Job:
        changes = {**MOVING, **settings(strategy), "train.output_dir": experiment.output(output), "train.save_steps": 3}
        resume = None if begins is None else str(experiment.output(begins) / "checkpoints" / "step-000003")
        return experiment.recipe, changes, resume

    def alone(job: Job) -> None:
        recipe, changes, resume = job
        run(load_recipe(recipe, overrides(changes)), resume=resume)

    alone(job("ddp", "copies"))
    jobs = [
        job("deepspeed_zero3", "parts"),
        job("deepspeed_zero3", "parts from parts", "parts"),
        job("deepspeed_zero3", "parts from copies", "copies"),
        job("deepspeed_zero1", "zero1 from parts", "parts"),
        job("deepspeed_zero2", "zero2 from copies", "copies"),
        job("fsdp2", "fsdp from parts", "parts"),
        job("fsdp2", "fsdp"),
        job("fsdp2", "fsdp from fsdp", "fsdp"),
        job("deepspeed_zero3", "parts from fsdp", "fsdp"),
    ]
    train_in_forked(warm, 2, jobs)
    alone(job("ddp", "copies from parts", "parts"))

    files = {path.name for path in (experiment.output("parts") / "checkpoints" / "step-000003").glob("optimizer*")}
    assert files == {"optimizer-00000-of-00002.safetensors", "optimizer-00001-of-00002.safetensors"}
    expected = weights(experiment.output("copies"))
    for name in (
        "parts",
        "parts from parts",
        "parts from copies",
        "zero1 from parts",
        "zero2 from copies",
        "fsdp from parts",
        "fsdp",
        "fsdp from fsdp",
        "parts from fsdp",
        "copies from parts",
    ):
        found = weights(experiment.output(name))
        assert found.keys() == expected.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=2e-5, msg=f"{name}: {key}")
    for whole, resumed in (("parts", "parts from parts"), ("fsdp", "fsdp from fsdp")):
        exact = weights(experiment.output(whole))
        assert all(torch.equal(value, exact[key]) for key, value in weights(experiment.output(resumed)).items())
    AutoModelForCausalLM.from_pretrained(experiment.output("parts") / "final")


def test_adapters_are_resumed_and_their_reference_kept_where_weights_are_in_parts(
    experiment: Experiment, warm: WarmStart
) -> None:
    """With magnitudes, which are measured on weights that no process has all of."""
    learning: dict[str, object] = {"grpo.beta": 0.1, "train.learning_rate": 0.01, "train.save_steps": 3}
    first = experiment.output("first adapters")
    new = {"model.lora": "{r: 2, use_dora: true, modules_to_save: [norm]}", "train.max_steps": 1}
    run(load_recipe(experiment.recipe, overrides({**learning, **new, "train.output_dir": first})))
    learning |= {"model.lora.adapter_name_or_path": first / "final"}

    def job(strategy: str, output: str, begins: str | None = None) -> Job:
        changes = {**learning, **settings(strategy), "train.output_dir": experiment.output(output)}
        resume = None if begins is None else str(experiment.output(begins) / "checkpoints" / "step-000003")
        return experiment.recipe, changes, resume

    run(load_recipe(experiment.recipe, overrides(job("ddp", "whole adapters")[1])))
    jobs = []
    for strategy in ("fsdp2", "deepspeed_zero3"):
        fresh = {**new, **settings(strategy), "train.output_dir": experiment.output(f"fresh {strategy}")}
        jobs += [
            (experiment.recipe, {**learning, "model.lora.adapter_name_or_path": "null", **fresh}, None),
            job(strategy, strategy),
            job(strategy, f"{strategy} again", strategy),
        ]
    train_in_forked(warm, 2, jobs)
    begun, expected = weights(first), weights(experiment.output("whole adapters"))
    for strategy in ("fsdp2", "deepspeed_zero3"):
        fresh_weights = weights(experiment.output(f"fresh {strategy}"))
        for key, value in fresh_weights.items():
            torch.testing.assert_close(value, begun[key], rtol=1e-4, atol=2e-5, msg=f"fresh {strategy}: {key}")
        kept = experiment.output(strategy) / "checkpoints" / "step-000003" / "reference" / "adapter_model.safetensors"
        assert all(torch.equal(value, begun[key]) for key, value in load_file(kept).items())
        found = weights(experiment.output(strategy))
        assert found.keys() == expected.keys() == load_file(kept).keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4, msg=f"{strategy}: {key}")
        resumed = weights(experiment.output(f"{strategy} again"))
        assert all(torch.equal(value, found[key]) for key, value in resumed.items())


def test_one_process_is_a_group_of_its_own(experiment: Experiment, warm: WarmStart) -> None:
    """Its parts are everything, and still only a library can put them together."""
    places = {name: {"train.output_dir": experiment.output(f"alone {name}")} for name in ("ddp", "fsdp2", "zero3")}
    run(load_recipe(experiment.recipe, overrides({**MOVING, **places["ddp"]})))
    jobs: list[Job] = [
        (experiment.recipe, {**MOVING, **settings("fsdp2"), **places["fsdp2"]}, None),
        (experiment.recipe, {**MOVING, **settings("deepspeed_zero3"), **places["zero3"]}, None),
    ]
    train_in_forked(warm, 1, jobs)
    for name in ("fsdp2", "zero3"):
        assert_close(experiment.output(f"alone {name}"), experiment.output("alone ddp"))


def test_weights_that_rest_in_main_memory_train_as_others(experiment: Experiment, warm: WarmStart) -> None:
    def job(output: str, resume: str | None, **more: object) -> Job:
        places = {"train.output_dir": experiment.output(output), "train.save_steps": 3}
        return experiment.recipe, {**MOVING, **settings("fsdp2"), **places, **more}, resume

    begun = str(experiment.output("offloaded") / "checkpoints" / "step-000003")
    offload: dict[str, object] = {"distributed.offload_params": True}
    train_in_forked(
        warm,
        2,
        [job("kept", None), job("offloaded", None, **offload), job("offloaded again", begun, **offload)],
    )
    expected = weights(experiment.output("kept"))
    for name in ("offloaded", "offloaded again"):
        assert all(torch.equal(value, expected[key]) for key, value in weights(experiment.output(name)).items())


@pytest.mark.parametrize(
    ("strategy", "kind"),
    # DeepSpeed's float32 copies are in the checkpoints.
    [("ddp", torch.float32), ("fsdp2", torch.float32), ("deepspeed_zero3", torch.bfloat16)],
)
def test_bfloat16_samples_and_trains_alike(
    experiment: Experiment, warm: WarmStart, strategy: str, kind: torch.dtype
) -> None:
    """Groups go through the model in parts here, within one autocast."""
    output = experiment.output(f"bf16 {strategy}")
    changes = {"train.bf16": True, "train.max_steps": 2, **settings(strategy), "train.output_dir": output}
    train_in_forked(warm, 1 if strategy == "ddp" else 2, [(experiment.recipe, changes, None)])
    assert {value.dtype for value in weights(output).values()} == {kind}
    difference = records(output)[0]["sampling/logp_difference/max"]
    assert 1e-5 < difference < 0.5  # two bfloat16 forwards round differently, and float32 ones would agree better


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_adapters_outside_of_layers_and_layers_of_other_names_are_trained(
    experiment: Experiment, warm: WarmStart, family: str
) -> None:
    """Whose reference is the policy without them: a forward of it must not freeze them."""
    changes: dict[str, object] = {
        "model.name_or_path": build_tiny_model(experiment.folder / family, family),
        "model.lora.r": 2,
        "rewards.reward_funcs": "[my_rewards.few_letters]",  # OPT draws random numbers in each forward, however many there are
        "grpo.beta": 0.1,
        "train.learning_rate": 0.01,
    }
    one, two = (experiment.output(f"{family} {name}") for name in ("one", "two"))
    run(load_recipe(experiment.recipe, overrides({**changes, "train.output_dir": one})))
    train_in_forked(warm, 2, [(experiment.recipe, {**changes, **settings("fsdp2"), "train.output_dir": two}, None)])
    assert_close(two, one)


@pytest.mark.parametrize("strategy", ["deepspeed_zero3", "fsdp2"])
def test_completions_are_sampled_the_fast_way_where_weights_are_in_parts(
    experiment: Experiment, warm: WarmStart, strategy: str
) -> None:
    """The engine looks at the model before it samples, when no process has all of it by itself."""
    changes: dict[str, object] = {
        **settings(strategy),
        "train.max_steps": 1,
        "model.lora": "{r: 2}",
        "train.output_dir": experiment.output(f"fast {strategy}"),
    }
    codes, output, errors = run_forked(warm, 2, "train", experiment.recipe, *overrides(changes))
    assert codes == [0, 0], errors
    assert "rank 2, alpha 32, on all-linear" in output
    assert "LlamaForCausalLM: " not in output, "which a notice of a slower way begins with"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_step_that_it_came_in(
    experiment: Experiment, warm: WarmStart, number: signal.Signals, code: int
) -> None:
    launched = Launched(experiment, f"stopped-{code}", *ENDLESS, warm=warm)
    launched.wait_for_steps(2)
    launched.process.send_signal(number)
    ended, output, errors = launched.end()
    assert ended == code, (output, errors)
    assert errors.count("stopped by") == 1
    assert "Traceback" not in errors
    done = records(launched.output)[-1]["step"]
    assert (launched.output / "checkpoints" / f"step-{done:06d}" / "manifest.json").is_file()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_others_within_seconds(experiment: Experiment, warm: WarmStart, rank: int) -> None:
    launched = Launched(experiment, f"killed-{rank}", *ENDLESS, "train.save_steps=1", warm=warm)
    launched.wait_for_steps(2)
    launched.end_by_killing(rank, seconds=60)
    assert list((launched.output / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "Adam"}}, "sets optimizer, which the recipe decides"),
        ({"zero_optimization": {"stage": 2}}, "asks for stage 2, distributed.strategy for 3"),
        ({"zero_optimization": {"stage3_no_such_key": 2}}, "stage3_no_such_key"),
        ([], "holds no JSON object"),
    ],
)
def test_a_wrong_configuration_is_told_in_one_line(
    experiment: Experiment, tmp_path: Path, warm: WarmStart, config: object, message: str
) -> None:
    (tmp_path / "wrong.json").write_text(json.dumps(config))
    wrong = {
        "train.output_dir": experiment.output("wrong"),
        "distributed.strategy": "deepspeed_zero3",
        "distributed.deepspeed_config": tmp_path / "wrong.json",
    }
    processes = start_forked(warm, 2, "train", experiment.recipe, *overrides(wrong))
    errors = "".join(process.communicate(timeout=120)[1] for process in processes)
    assert [process.returncode for process in processes] == [2, 2]
    assert message in errors
    assert errors.count("distributed.deepspeed_config") == 1
    assert "Traceback" not in errors


@pytest.mark.parametrize("strategy", ["deepspeed_zero1", "deepspeed_zero3", "fsdp2"])
def test_a_process_that_no_launcher_has_started_takes_every_strategy(
    experiment: Experiment, warm: WarmStart, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    output = f"train.output_dir={experiment.output(f'alone-{strategy}')}"
    done = warm.run("train", experiment.recipe, output, "train.max_steps=1", f"distributed.strategy={strategy}")
    assert done.returncode == 0, done.stderr
