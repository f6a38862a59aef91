"""What a plan says, against numbers that are counted by hand."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from grpo_cli.cli.app import _Options, app
from grpo_cli.engine.strategies.spread import spread_of
from grpo_cli.errors import DataError, GrpoError, ModelError
from grpo_cli.planning.machine import SPEEDS, Machine, planned_machine
from grpo_cli.planning.plan import longest_prompt, plan_training
from grpo_cli.planning.report import print_training_plan
from grpo_cli.planning.work import Model, step_seconds, step_work
from grpo_cli.policy.load import load_shapes
from grpo_cli.recipe.load import load_recipe
from grpo_cli.recipe.schema import Recipe, VllmSection

QWEN_72B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
"""The configuration of Qwen2.5-72B."""

PARAMETERS = 2 * 152064 * 8192 + 8192 + 80 * (8192 * (2 * 8192 + 2 * 1024 + 3 * 29568) + 8192 + 2 * 1024 + 2 * 8192)
"""Embedding, head and last norm; and of each layer: projections, their biases, norms."""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_72B))
    return tmp_path


def recipe_of(model: Path, *changes: str) -> Recipe:
    recipe = Path("recipes/qwen2.5-72b.yaml")
    return load_recipe(recipe, [f"model.name_or_path={model}", *changes]).recipe


def machine_of(gpus: int, memory: float = 80) -> Machine:
    return planned_machine(gpus=gpus, gpu_memory=memory)


def test_the_reference_case_is_counted_to_the_byte(large: Path) -> None:
    """Four nodes of eight GPUs: 2 bytes a weight, 2 a gradient, 12 in the optimizer, in 32 parts."""
    plan = plan_training(recipe_of(large), folder=large, machine=machine_of(32))
    assert plan.parameters == PARAMETERS
    part = PARAMETERS / 32
    assert plan.memory.weights == pytest.approx(2 * part, abs=1)
    assert plan.memory.gradients == pytest.approx(2 * part, abs=1)
    assert plan.memory.optimizer == pytest.approx(12 * part, abs=1)
    assert (plan.memory.vllm, plan.memory.cache, plan.memory.sampled, plan.memory.reference) == (0, 0, 0, 0)
    assert not plan.is_too_large(machine_of(32))
    assert plan.work.completions == 512
    assert plan.work.trained_tokens == 64 * (512 + 8 * 2048)
    assert plan.work.sampled_tokens == 64 * 8 * 2048


def test_what_does_not_fit_is_told_with_what_would_help(large: Path) -> None:
    recipe, machine = recipe_of(large), machine_of(8)
    plan = plan_training(recipe, folder=large, machine=machine)
    assert plan.is_too_large(machine)
    found = {one.change: one.total for one in plan.remedies}
    assert (
        "--gpus 16" not in found
    )  # 12 bytes of 73 billion in 16 parts are 55 GB, and 18 GB more of weights and gradients
    assert {"--gpus 32", "distributed.strategy=deepspeed_zero3 distributed.offload_optimizer=true"} <= found.keys()
    assert all(total <= machine.memory for total in found.values() if machine.memory)


@pytest.mark.parametrize(("beta", "copies"), [(0.0, 1), (0.04, 2)])
def test_auto_spreads_what_has_no_room_and_says_why(large: Path, beta: float, copies: int) -> None:
    recipe = recipe_of(large, "distributed.strategy=auto", f"grpo.beta={beta}")
    plan = plan_training(recipe, folder=large, machine=machine_of(64))
    assert plan.spread.name == "deepspeed_zero3"
    assert "a copy of everything takes" in (plan.reason or "")
    assert plan.memory.weights + plan.memory.reference == copies * plan.memory.weights
    assert plan_training(recipe, folder=large, machine=machine_of(8, 3000)).spread.name == "ddp"


def test_adapters_leave_little_to_the_optimizer(large: Path) -> None:
    recipe = recipe_of(large, "model.lora.r=8", "grpo.beta=0.1")
    plan = plan_training(recipe, folder=large, machine=machine_of(32))
    rows_and_columns = 80 * sum(8 * (8192 + width) for width in (8192, 1024, 1024, 8192, 29568, 29568, 29568))
    assert plan.trained_parameters == rows_and_columns
    assert plan.memory.reference == 0
    assert plan.memory.optimizer == pytest.approx(12 * rows_and_columns / 32, abs=1)


@pytest.mark.parametrize(
    ("bits", "nested", "per_weight"), [("8bit", False, 1.0), ("4bit", False, 0.5625), ("4bit", True, 0.515625)]
)
def test_quantized_weights_are_counted_as_they_are_kept(
    bits: str, nested: bool, per_weight: float, large: Path
) -> None:
    """One byte, or half of one and a scale for 64 weights: of four bytes, or of one."""
    lora = ("model.lora.r=8", "grpo.beta=0.1", "distributed.strategy=ddp")
    changes = (*lora, f"model.quantization={bits}", *(["model.bnb_4bit_use_double_quant=true"] if nested else []))
    plain = plan_training(recipe_of(large, *lora), folder=large, machine=machine_of(32))
    plan = plan_training(recipe_of(large, *changes), folder=large, machine=machine_of(32))
    assert plan.parameters == plain.parameters
    assert plan.trained_parameters == plain.trained_parameters
    assert plan.spread.name == "ddp"
    linear = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 29568)
    saved = plain.memory.weights - plan.memory.weights
    assert saved == pytest.approx(linear * (plain.dtype.itemsize - per_weight), rel=1e-3)
    assert plan.memory.gathered > 0, "one matrix at a time is there as floats"


def test_passes_are_those_of_a_generation(large: Path) -> None:
    recipe = recipe_of(large, "grpo.beta=0.1", "grpo.num_iterations=2", "grpo.steps_per_generation=4")
    work = step_work(recipe, longest_prompt=512, micro_batch_tokens=8192, processes=32)
    # Of eight steps, four see their completions for the first time; the first of these finds the old ones in its own forward.
    assert (work.reference_passes, work.old_passes) == (4 / 8, 3 / 8)
    assert work.sampled_tokens == 64 * 8 * 2048 / 2
    assert work.micro_batches == -(-64 * (512 + 8 * 2048) // 32 // 8192)


def seconds(recipe: Recipe, model: Path, processes: int = 32, name: str = "deepspeed_zero3") -> dict[str, float]:
    work = step_work(recipe, longest_prompt=512, micro_batch_tokens=8192, processes=processes)
    machine = Machine(device=torch.device("cuda"), processes=processes, memory=None, speed=SPEEDS["cuda"])
    return step_seconds(
        recipe,
        work,
        Model.of(load_shapes(recipe.model, folder=model)),
        machine=machine,
        spread=spread_of(name, processes),
        longest_prompt=512,
        checkpointing=True,
    )


def test_time_goes_where_the_work_is(large: Path) -> None:
    usual = seconds(recipe_of(large), large)
    tokens = 64 * (512 + 8 * 2048)
    operations = (
        4 * tokens * (2 * PARAMETERS + 4 * 80 * 8192 * (512 + 1024))
    )  # forward, again, and twice as much backward
    assert usual["forward and backward"] == pytest.approx(operations / 32 / SPEEDS["cuda"].operations, rel=0.01)
    one = seconds(recipe_of(large), large, processes=1, name="ddp")
    assert one["exchange between processes"] == 0
    shorter = seconds(recipe_of(large, "generation.max_completion_length=512"), large)
    assert shorter["sampling"] < usual["sampling"] / 3
    reused = seconds(recipe_of(large, "grpo.num_iterations=2"), large)
    assert reused["sampling"] < usual["sampling"]
    assert reused["new weights to vLLM"] == usual["new weights to vLLM"] / 2


def test_idle_experts_take_no_time(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, "qwen3_moe"))
    experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    count = sum(one.numel() for one in model.parameters())
    assert Model.of(model).active == count - experts / 2  # two of four


def test_the_longest_prompt_is_the_datasets_where_the_recipe_sets_no_limit(tiny_model_folder: Path) -> None:
    loaded = load_recipe(Path("recipes/quickstart.yaml"), [f"model.name_or_path={tiny_model_folder}"])
    found = longest_prompt(loaded.recipe, loaded.folder)
    loaded.recipe.dataset.max_prompt_length = 7
    assert found > 7 == longest_prompt(loaded.recipe, loaded.folder)


def test_a_machine_is_this_one_or_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = planned_machine(gpus=None, gpu_memory=None)
    assert (here.device.type, here.processes) == ("cpu", 1)
    there = planned_machine(gpus=16, gpu_memory=141, tflops=600, bandwidth=4)
    assert (there.device.type, there.processes, there.memory) == ("cuda", 16, 141_000_000_000)
    assert (there.speed.operations, there.speed.memory_bytes) == (600e12, 4e12)
    with pytest.raises(GrpoError, match="no GPU whose memory could be read"):
        planned_machine(gpus=16, gpu_memory=None)


def test_the_command_prints_parts_bottleneck_and_verdict(large: Path) -> None:
    def told(*arguments: str, code: int) -> str:
        command = ["plan", "recipes/qwen2.5-72b.yaml", f"model.name_or_path={large}", *arguments]
        outcome = CliRunner().invoke(app, command, obj=_Options())
        assert outcome.exit_code == code, outcome.output
        return outcome.output

    fitting = told("--gpus", "32", "--gpu-memory", "80", code=0)
    for part in ("72.7B parameters", "deepspeed_zero3", "weights", "gradients", "optimizer", "activations", "head"):
        assert part in fitting
    assert "bottleneck" in fitting
    assert "\nfits: " in fitting
    too_large = told("--gpus", "8", "--gpu-memory", "80", code=6)
    assert "does not fit" in too_large
    assert "fits with --gpus 32" in too_large


def test_vllm_needs_room_for_its_weights(large: Path) -> None:
    """72.7 billion parameters in bfloat16 are 135 GiB; eight devices share them."""
    share = ("vllm.mode=colocate", "vllm.gpu_memory_utilization=0.2")
    for size, starves in ((1, True), (8, True), (16, False)):
        recipe = recipe_of(large, *share, f"vllm.tensor_parallel_size={size}")
        plan = plan_training(recipe, folder=large, machine=machine_of(32))
        assert plan.starves_vllm == plan.is_too_large(machine_of(32)) == starves


def test_a_sleeping_vllm_leaves_its_memory_to_training(large: Path) -> None:
    settings = ("vllm.mode=colocate", "vllm.gpu_memory_utilization=0.5", "vllm.tensor_parallel_size=8")
    awake, asleep = (
        plan_training(
            recipe_of(large, *settings, f"vllm.enable_sleep_mode={mode}"), folder=large, machine=machine_of(64)
        ).memory
        for mode in ("false", "true")
    )
    assert awake.vllm == asleep.vllm == 40_000_000_000
    assert awake.training - awake.vllm <= asleep.training < awake.training
    assert asleep.sampling == awake.sampling


def test_auto_counts_with_the_share_of_vllm(large: Path) -> None:
    """A copy of everything takes 8 bytes a parameter: 542 GiB."""
    settings = ("distributed.strategy=auto", "vllm.mode=colocate", "vllm.gpu_memory_utilization=0.5")
    beside = plan_training(recipe_of(large, *settings), folder=large, machine=machine_of(8, 1200))
    asleep = recipe_of(large, *settings, "vllm.enable_sleep_mode=true")
    assert beside.spread.name == "deepspeed_zero3"
    assert plan_training(asleep, folder=large, machine=machine_of(8, 1200)).spread.name == "ddp"


def test_a_completion_is_not_cut_however_small_the_budget(large: Path) -> None:
    small = plan_training(recipe_of(large, "train.micro_batch_tokens=64"), folder=large, machine=machine_of(32))
    whole = plan_training(recipe_of(large, "train.micro_batch_tokens=2560"), folder=large, machine=machine_of(32))
    assert small.memory.activations == whole.memory.activations
    assert small.work.micro_batches == 64 * 8 // 32


def test_a_generation_of_several_steps_is_sampled_at_once(large: Path) -> None:
    def planned(steps: int) -> Any:
        recipe = recipe_of(large, "generation.max_num_seqs=100000", f"grpo.steps_per_generation={steps}")
        return plan_training(replace(recipe, vllm=VllmSection()), folder=large, machine=machine_of(32, 10_000))

    one, four = planned(1), planned(4)
    assert four.memory.cache == 4 * one.memory.cache
    assert four.seconds["sampling"] < one.seconds["sampling"]  # more sequences read the same weights


def test_settings_of_deepspeed_are_read(large: Path) -> None:
    settings = {"zero_optimization": {"stage3_max_live_parameters": 0, "offload_optimizer": {"device": "cpu"}}}
    (large / "own.json").write_text(json.dumps(settings))
    usual = plan_training(recipe_of(large), folder=large, machine=machine_of(32))
    own = plan_training(recipe_of(large, "distributed.deepspeed_config=own.json"), folder=large, machine=machine_of(32))
    assert own.memory.optimizer == 0
    assert own.memory.gathered <= usual.memory.gathered


@pytest.mark.parametrize("memory", [float("inf"), float("nan")])
def test_a_memory_that_is_no_number_is_refused(memory: float) -> None:
    with pytest.raises(GrpoError, match="--gpu-memory: found"):
        planned_machine(gpus=8, gpu_memory=memory)


def test_the_prompts_of_a_stream_are_not_guessed() -> None:
    loaded = load_recipe(Path("recipes/quickstart.yaml"), ["dataset.streaming=true", "train.max_steps=5"])
    with pytest.raises(DataError, match="stream"):
        longest_prompt(loaded.recipe, loaded.folder)


def test_frozen_parts_have_no_gradients(tiny_model_folder: Path) -> None:
    """One of two layers is trained, or gets adapters."""

    def trained(*changes: str) -> int:
        recipe = load_recipe(
            Path("recipes/quickstart.yaml"),
            [f"model.name_or_path={tiny_model_folder}", "dataset.max_prompt_length=8", *changes],
        ).recipe
        return plan_training(recipe, folder=tiny_model_folder, machine=machine_of(1)).trained_parameters

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    layer = sum(one.numel() for one in model.model.layers[0].parameters())
    frozen = "model.freeze=[model.layers.0]"
    assert trained() - trained(frozen) == layer
    assert trained("model.lora={r: 2}", frozen) == trained("model.lora={r: 2}") // 2


def test_names_of_parts_are_looked_up_before_the_dataset_is_read(tiny_model_folder: Path) -> None:
    """Whose stream would be refused."""
    for change in ("train.learning_rates.lm_hed=0.1", "model.freeze=[lm_hed]", "model.lora.target_modules=[q_prj]"):
        changes = [f"model.name_or_path={tiny_model_folder}", "dataset.streaming=true", "train.max_steps=5", change]
        recipe = load_recipe(Path("recipes/quickstart.yaml"), changes).recipe
        with pytest.raises(ModelError, match=r"did you mean `(lm_head|q_proj)`"):
            plan_training(recipe, folder=tiny_model_folder, machine=machine_of(1))


def test_adapters_and_rounding_are_shown(tiny_model_folder: Path) -> None:
    changes = ["model.lora={r: 2, target_modules: [q_proj]}", "model.quantization=4bit", "dataset.max_prompt_length=8"]
    recipe = load_recipe(Path("recipes/quickstart.yaml"), [f"model.name_or_path={tiny_model_folder}", *changes]).recipe
    plan = plan_training(recipe, folder=tiny_model_folder, machine=machine_of(1))
    written = io.StringIO()
    print_training_plan(Console(file=written, width=200), plan, model=recipe.model, machine=machine_of(1))
    assert "adapters   rank 2, alpha 32, on q_proj; on weights in 4 bits (nf4)\n" in written.getvalue()
