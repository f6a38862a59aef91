"""Whole runs that train adapters on quantized weights."""

from pathlib import Path

import pytest
import torch
from e2e.experiment import assert_same_run, make_experiment, records, weights
from e2e.test_resume import stop_at_every_step, train
from many_processes import Job, overrides, train_in_forked
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM
from warm_start import WarmStart

from grpo_cli.engine.run import run
from grpo_cli.policy.load import load_model
from grpo_cli.policy.quantization import is_quantized, with_quantization
from grpo_cli.recipe.load import load_recipe
from grpo_cli.recipe.schema import LoraSection, ModelSection

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_run_is_resumed_bit_for_bit_and_gives_a_whole_model(bits: str, tmp_path: Path, warm: WarmStart) -> None:
    folder = build_tiny_model(tmp_path / "model", hidden_size=64)
    experiment = make_experiment(
        tmp_path / "run",
        folder,
        model={"quantization": bits, "lora": {"r": 2}},
        grpo={"num_generations": 2, "steps_per_generation": 2, "beta": 0.05},
        train={"save_steps": 3},
    )
    train(experiment, "whole")
    stop_at_every_step(experiment, "stopped")
    assert_same_run(experiment.output("stopped"), experiment.output("whole"))
    told = records(experiment.output("whole"))
    assert told[-1]["kl"] > 1e-3
    assert all(record["sampling/logp_difference/mean"] < 1e-4 for record in told[::2]), (
        "but for dropout, at the first step"
    )
    assert all(".lora_" in name for name in weights(experiment.output("whole")))

    final = experiment.output("whole") / "final"
    merged = warm.run("export", "--merge", final, tmp_path / "merged")
    assert (merged.returncode, merged.stderr) == (0, "")
    section = ModelSection(name_or_path=str(folder), lora=LoraSection(r=2))
    trained = load_model(with_quantization(section, final), folder=folder, adapters=final)
    assert any(is_quantized(layer) for layer in trained.modules())
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = trained(ids).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert not (tmp_path / "merged" / "quantization.json").exists()


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_processes_that_cut_the_optimizers_states_train_as_one(bits: str, warm: WarmStart, tmp_path: Path) -> None:
    """The frozen weights are whole in each of them; a checkpoint goes on anywhere."""
    pytest.importorskip("deepspeed")
    experiment = make_experiment(
        tmp_path / "run",
        build_tiny_model(tmp_path / "model", hidden_size=64),
        model={"quantization": bits, "lora": {"r": 2}},
        grpo={"num_generations": 3, "beta": 0.05},
        generation={"max_completion_length": 10},
        train={"prompts_per_step": 3, "max_steps": 4, "learning_rate": 0.001, "save_steps": 2},
    )

    def job(strategy: str, output: str, begins: str | None = None) -> Job:
        changes = {"distributed.strategy": strategy, "train.output_dir": experiment.output(output)}
        resume = None if begins is None else str(experiment.output(begins) / "checkpoints" / "step-000002")
        return experiment.recipe, changes, resume

    def alone(output: str, begins: str | None = None) -> None:
        recipe, changes, resume = job("ddp", output, begins)
        run(load_recipe(recipe, overrides(changes)), resume=resume)

    alone("alone")
    jobs = {
        "zero1": job("deepspeed_zero1", "zero1"),
        "zero2": job("deepspeed_zero2", "zero2"),
        "from alone": job("deepspeed_zero2", "from alone", "alone"),
    }
    train_in_forked(warm, 2, [*jobs.values()])
    alone("from zero2", "zero2")
    expected = weights(experiment.output("alone"))
    for name in (*jobs, "from zero2"):
        found = weights(experiment.output(name))
        assert found.keys() == expected.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=2e-5, msg=f"{name}: {key}")
    assert max(one.abs().max() for name, one in expected.items() if "lora_B" in name) > 1e-3, "they have moved"
