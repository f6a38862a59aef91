"""Composition of recipes: files that extend each other, overrides, references, positions, and writing them back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_cli.errors import RecipeError
from grpo_cli.recipe.kinds import is_section, types_of, without_none
from grpo_cli.recipe.load import dump_recipe, load_recipe
from grpo_cli.recipe.schema import Recipe

pytestmark = pytest.mark.usefixtures("recipe_folder")

Report = Callable[..., str]

EVERYTHING_WRONG = """\
model:
  name_or_path: org/model
  dtyp: float32
num_generations: 4
dataset:
  name: prompts.jsonl
  max_rows: 3
grpo:
  loss_type: cispo
  epsilon: -1
  beta: 0.1
  beta: 0.2
rewards:
  reward_funcs:
    - table_rewards.brevety
    - table_rewards.politeness
    - table_rewards.politeness
generation:
  temperature: 0
  min_completion_length: 500
train:
  prompts_per_step: 4
  max_steps: 2.5
  output_dir: ${nowhere}
"""

EVERYTHING_REPORTED = """\
many.yaml:3: model.dtyp: unknown key; allowed in `model`: name_or_path, revision, tokenizer_name_or_path, dtype, \
attn_implementation, quantization, bnb_4bit_quant_type, bnb_4bit_use_double_quant, bnb_4bit_compute_dtype, share_prefix, trust_remote_code, chat_template_path, lora (did you mean `dtype`?)
many.yaml:4: num_generations: unknown key; allowed in the recipe: run_name, model, dataset, rewards, grpo, generation, vllm, train, \
eval, distributed, logging (did you mean `grpo.num_generations`?)
many.yaml:7: dataset.max_rows: found 3 rows, but one step takes 4 prompts by `train.prompts_per_step` (use more rows, or lower \
`train.prompts_per_step` to 3)
many.yaml:9: grpo.epsilon_high: not set; required with loss_type cispo, where it is the ceiling of the ratio itself, not a \
distance from 1 (5 is a usual ceiling)
many.yaml:10: grpo.epsilon: found -1; allowed: a number, above 0
many.yaml:12: grpo.beta: duplicate key; it was set before on line 11 (remove one of the two)
many.yaml:15: rewards.reward_funcs[0].path: found "table_rewards.brevety"; `table_rewards` has no `brevety` (did you mean \
`brevity`?)
many.yaml:17: rewards.reward_funcs[2]: found a second reward with the name `politeness`; allowed: one name each (add `name: \
politeness_2`)
many.yaml:19: generation.temperature: found 0; allowed: a number, above 0 and at most 10
many.yaml:20: generation.min_completion_length: found 500; allowed: at most generation.max_completion_length, which is 256
many.yaml:23: train.max_steps: found 2.5; allowed: an integer, at least 1, or null
many.yaml:24: train.output_dir: cannot resolve "${nowhere}": Interpolation key 'nowhere' not found (write \\${ for the \
characters themselves)
command line: train.seed: found "x"; allowed: an integer, at least 0 and at most 9223372036854775807"""


def load(text: str, *overrides: str, path: str = "recipe.yaml") -> Recipe:
    Path(path).write_text(text)
    return load_recipe(Path(path), overrides).recipe


def test_all_problems_are_reported_at_once_in_the_order_of_the_lines() -> None:
    with pytest.raises(RecipeError) as caught:
        load(EVERYTHING_WRONG, "train.seed=x", path="many.yaml")
    assert str(caught.value) == EVERYTHING_REPORTED


def test_what_is_required_is_missing_from_an_empty_recipe() -> None:
    with pytest.raises(RecipeError) as caught:
        load("")
    assert [problem.key for problem in caught.value.problems] == [
        "model.name_or_path",
        "dataset.name",
        "rewards.reward_funcs",
    ]


def test_a_recipe_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(RecipeError, match=r'^recipe.yaml:1: found the list \["a"\]; allowed: a mapping of sections'):
        load("- a\n")


def test_a_missing_recipe_is_guessed() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("goood.yaml"))
    assert str(caught.value) == "goood.yaml: does not exist; allowed: a YAML file (did you mean `good.yaml`?)"


def test_a_recipe_that_is_not_text_is_refused() -> None:
    Path("recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"^recipe.yaml: cannot be read: 'utf-8' codec"):
        load_recipe(Path("recipe.yaml"))


def test_defaults_fill_what_is_left_out(recipe_folder: Path) -> None:
    loaded = load_recipe(Path("good.yaml"))
    assert loaded.folder == recipe_folder
    assert loaded.recipe.run_name == "good"
    assert loaded.recipe.train.output_dir == "runs/good"
    assert loaded.recipe.train.prompts_per_step == 4
    assert loaded.recipe.grpo.loss_type == "dapo"


def test_sections_are_dataclasses_down_to_the_items_of_a_list() -> None:
    recipe = load("extends: good.yaml\neval: {dataset: {name: prompts.jsonl}}\n")
    assert recipe.rewards.reward_funcs[0].path == "table_rewards.brevity"
    assert recipe.rewards.reward_funcs[0].parameters == {}
    assert recipe.eval.dataset is not None
    assert recipe.eval.dataset.split == "train"


@pytest.mark.parametrize("written", ["1e-6", "1E-6", "1.e-6", "0.000001", ".1e-5", "1.0e-06"])
def test_a_number_may_have_an_exponent_without_a_dot(written: str) -> None:
    assert load(f"extends: good.yaml\ntrain: {{learning_rate: {written}}}\n").train.learning_rate == 1e-6
    assert load("extends: good.yaml\n", f"train.learning_rate={written}").train.learning_rate == 1e-6


def test_an_integer_is_fine_for_a_number_and_becomes_one() -> None:
    recipe = load("extends: good.yaml\nrewards: {reward_weights: [2]}\ngeneration: {temperature: 1}\n")
    assert isinstance(recipe.generation.temperature, float)
    assert recipe.rewards.reward_weights is not None
    assert isinstance(recipe.rewards.reward_weights[0], float)


def test_a_section_without_keys_keeps_its_defaults() -> None:
    assert load("extends: good.yaml\nlogging:\n") == load("extends: good.yaml\n")


def test_anchors_and_merge_keys_work() -> None:
    recipe = load(
        "extends: good.yaml\n"
        "dataset: {chat_template_kwargs: &shared {a: 1, b: 2}}\n"
        "eval: {dataset: {name: prompts.jsonl, chat_template_kwargs: {<<: *shared, b: 3}}}\n"
    )
    assert recipe.dataset.chat_template_kwargs == {"a": 1, "b": 2}
    assert recipe.eval.dataset is not None
    assert recipe.eval.dataset.chat_template_kwargs == {"a": 1, "b": 3}


def test_a_value_that_is_wrong_is_not_also_blamed_for_what_it_would_mean_elsewhere(report: Report) -> None:
    assert report("grpo: {loss_type: luspo, importance_sampling_level: sequenc}\n").splitlines() == [
        'recipe.yaml:2: grpo.importance_sampling_level: found "sequenc"; allowed: token, sequence (did you mean `sequence`?)'
    ]


class TestExtends:
    def test_the_nearer_file_wins_and_lists_are_replaced(self) -> None:
        Path("base.yaml").write_text(
            "extends: good.yaml\ngrpo: {epsilon: 0.1, beta: 0.5}\ngeneration: {stop: [a, b]}\n"
        )
        recipe = load("extends: base.yaml\ngrpo: {epsilon: 0.3}\ngeneration: {stop: [c]}\n")
        assert (recipe.grpo.epsilon, recipe.grpo.beta) == (0.3, 0.5)
        assert recipe.generation.stop == ["c"]
        assert recipe.run_name == "recipe"

    def test_of_several_the_later_wins(self) -> None:
        Path("one.yaml").write_text("grpo: {epsilon: 0.1, beta: 0.5}\n")
        Path("two.yaml").write_text("grpo: {epsilon: 0.4}\n")
        recipe = load("extends: [good.yaml, one.yaml, two.yaml]\n")
        assert (recipe.grpo.epsilon, recipe.grpo.beta) == (0.4, 0.5)

    def test_paths_start_at_the_file_that_names_them(self) -> None:
        Path("shared").mkdir()
        Path("shared/losses.yaml").write_text("extends: more.yaml\n")
        Path("shared/more.yaml").write_text("grpo: {beta: 0.5}\n")
        assert load("extends: [good.yaml, shared/losses.yaml]\n").grpo.beta == 0.5

    def test_a_problem_is_blamed_on_the_file_that_wrote_it(self, report: Report) -> None:
        Path("shared").mkdir()
        Path("shared/losses.yaml").write_text("# losses\ngrpo:\n  epsilon: -1\n")
        message = "grpo.epsilon: found -1; allowed: a number, above 0"
        assert report("") == ""
        with pytest.raises(RecipeError) as caught:
            load("extends: [good.yaml, shared/losses.yaml]\n")
        assert str(caught.value) == f"shared/losses.yaml:3: {message}"
        with pytest.raises(RecipeError) as caught:
            load("extends: [good.yaml, shared/losses.yaml]\ngrpo:\n  beta: 0.1\n  epsilon: -1\n")
        assert str(caught.value) == f"recipe.yaml:4: {message}"
        with pytest.raises(RecipeError) as caught:
            load("extends: [good.yaml, shared/losses.yaml]\n", "grpo.epsilon=-1")
        assert str(caught.value) == f"command line: {message}"

    def test_a_circle_is_shown(self) -> None:
        Path("a.yaml").write_text("extends: b.yaml\n")
        Path("b.yaml").write_text("# b\nextends: a.yaml\n")
        with pytest.raises(RecipeError) as caught:
            load_recipe(Path("a.yaml"))
        expected = "b.yaml:2: extends: files extend each other in a circle: a.yaml -> b.yaml -> a.yaml"
        assert str(caught.value) == expected

    def test_the_same_file_may_be_reached_twice(self) -> None:
        Path("a.yaml").write_text("extends: good.yaml\n")
        Path("b.yaml").write_text("extends: good.yaml\n")
        assert load("extends: [a.yaml, b.yaml]\n").train.prompts_per_step == 4

    def test_a_missing_file_is_guessed(self) -> None:
        with pytest.raises(RecipeError) as caught:
            load("run_name: x\nextends: goood.yaml\n")
        expected = 'recipe.yaml:2: extends: found "goood.yaml", which does not exist; allowed: a YAML file'
        assert str(caught.value) == f"{expected} (did you mean `good.yaml`?)"

    def test_anything_but_paths_is_refused(self) -> None:
        with pytest.raises(RecipeError) as caught:
            load("extends: {a: 1}\n")
        expected = (
            'recipe.yaml:1: extends: found the mapping {"a": 1}; allowed: the path of a recipe, or a list of paths'
        )
        assert str(caught.value) == expected

    def test_broken_files_are_all_reported(self) -> None:
        Path("a.yaml").write_text("grpo: [\n")
        Path("b.yaml").write_text("- 1\n")
        with pytest.raises(RecipeError) as caught:
            load("extends: [a.yaml, b.yaml]\n")
        assert [problem.where for problem in caught.value.problems] == ["a.yaml:2", "b.yaml:1"]


class TestOverrides:
    def test_values_are_yaml(self) -> None:
        overrides = ("train.bf16=true", "generation.stop=[a, b]", "dataset.columns={prompt: q}", "dataset.config=")
        recipe = load("extends: good.yaml\ndataset: {config: main}\n", *overrides)
        assert recipe.train.bf16 is True
        assert recipe.generation.stop == ["a", "b"]
        assert recipe.dataset.columns == {"prompt": "q"}
        assert recipe.dataset.config is None

    def test_the_later_wins(self) -> None:
        assert load("extends: good.yaml\n", "train.seed=1", "train.seed=2").train.seed == 2

    def test_a_value_may_contain_an_equals_sign(self) -> None:
        assert load("extends: good.yaml\n", "dataset.system_prompt=a=b").dataset.system_prompt == "a=b"

    @pytest.mark.parametrize("item", ["[1]", ".1"])
    def test_an_item_of_a_list_can_be_set(self, item: str) -> None:
        text = (
            "extends: good.yaml\nrewards:\n  reward_funcs: [table_rewards.brevity, table_rewards.politeness]\n"
            "  reward_weights: [1, 2]\n"
        )
        overrides = (f"rewards.reward_weights{item}=0.5", f"rewards.reward_funcs{item}.parameters.limit=3")
        rewards = load(text, *overrides).rewards
        assert rewards.reward_weights == [1, 0.5]
        assert [entry.parameters for entry in rewards.reward_funcs] == [{}, {"limit": 3}]

    def test_a_list_is_replaced(self) -> None:
        rewards = load("extends: good.yaml\n", "rewards.reward_funcs=[table_rewards.politeness]").rewards
        assert [entry.path for entry in rewards.reward_funcs] == ["table_rewards.politeness"]

    def test_a_mapping_is_merged_entry_by_entry(self) -> None:
        text = "extends: good.yaml\ndataset: {chat_template_kwargs: {a: 1, b: 2}}\n"
        recipe = load(text, "dataset.chat_template_kwargs.b=3", "dataset.chat_template_kwargs={c: 4}")
        assert recipe.dataset.chat_template_kwargs == {"a": 1, "b": 3, "c": 4}

    def test_null_takes_an_optional_section_away(self) -> None:
        text = "extends: good.yaml\neval: {dataset: {name: prompts.jsonl}}\n"
        assert load(text, "eval.dataset=null").eval.dataset is None


class TestReferences:
    def test_a_reference_stands_for_the_final_value(self) -> None:
        Path("base.yaml").write_text(
            "extends: good.yaml\neval: {dataset: {name: prompts.jsonl}, num_generations: '${grpo.num_generations}', temperature: 1}\n"
        )
        assert load("extends: base.yaml\n").eval.num_generations == 8
        assert load("extends: base.yaml\ngrpo: {num_generations: 3}\n").eval.num_generations == 3
        assert load("extends: base.yaml\n", "grpo.num_generations=5").eval.num_generations == 5

    def test_a_whole_section_can_be_referred_to(self) -> None:
        recipe = load("extends: good.yaml\neval: {dataset: '${dataset}'}\n")
        assert recipe.eval.dataset == recipe.dataset

    def test_the_environment_can_be_referred_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GRPO_TEST_FOLDER", "scratch")
        assert (
            load("extends: good.yaml\n", "train.output_dir=${oc.env:GRPO_TEST_FOLDER}/x").train.output_dir
            == "scratch/x"
        )

    def test_an_escaped_reference_is_text(self) -> None:
        assert load("extends: good.yaml\ndataset: {system_prompt: 'pay \\${x}'}\n").dataset.system_prompt == "pay ${x}"


RECIPES_THAT_ARE_FINE = [
    "",
    "train: {learning_rate: 1e-6, max_steps: 10, warmup_ratio: 0.1}\n",
    "run_name: '1e-6'\ndataset: {system_prompt: 'a ${run_name} and \\${run_name}, # null: yes'}\n",
    "eval: {dataset: {name: prompts.jsonl, split: 'train[:2]'}, every: 5, best_metric: eval/reward}\n",
    "rewards: {reward_funcs: [{path: table_rewards.brevity, name: 'off', parameters: {x: [1, {y: null}], z: ä}}]}\n",
    "grpo: {loss_type: cispo, epsilon_high: 5}\n",
    "grpo: {loss_type: luspo, importance_sampling_level: sequence, delta: 1.2}\n",
    "grpo: {beta: 0.1, sync_ref_model: true, use_bias_correction_kl: true}\n",
    "eval: {dataset: {name: prompts.jsonl}, repetition_penalty: 1.3, temperature: 0.5, num_generations: 4}\n",
    "grpo: {loss_type: sapo, sapo_temperature_neg: 1.2, epsilon: 0.2, epsilon_high: null, vespo_k_pos: 2}\n",
    "grpo: {loss_type: vespo, vespo_lambda_neg: 1, off_policy_mask_threshold: 0.1, num_iterations: 2}\n",
    "grpo: {multi_objective_aggregation: normalize_then_sum, scale_rewards: group, ref_model_sync_steps: 512}\n",
    "model: {name_or_path: 'package://yaml/loader.py', tokenizer_name_or_path: 'package://yaml'}\n",
    "train: {seed: 9223372036854775807}\ngeneration: {min_p: 0.99}\n",
    "rewards: {reward_funcs: [{model: org/judge, batch_size: 4, max_length: 8}]}\n",
    "dataset: {streaming: true}\ntrain: {max_steps: 3}\n",
]


@pytest.mark.parametrize("changes", RECIPES_THAT_ARE_FINE)
def test_a_recipe_that_is_written_out_loads_as_the_same(changes: str) -> None:
    recipe = load(f"extends: good.yaml\n{changes}")
    assert load(dump_recipe(recipe), path="written.yaml") == recipe


def test_every_number_is_finite(report: Report) -> None:
    """Whatever bounds a key has: no comparison refuses nan."""
    numbers = [
        (section, name)
        for section, part in types_of(Recipe).items()
        if is_section(part)
        for name, kind in types_of(part).items()
        if without_none(kind)[0] is float
    ]
    assert len(numbers) > 30
    for section, name in numbers:
        for value in (".nan", ".inf", "-.inf"):
            assert f"{section}.{name}: found {value.replace('.', '')}; allowed: " in report(
                "", f"{section}.{name}={value}"
            )


def test_it_is_known_which_keys_were_given(recipe_folder: Path) -> None:
    (recipe_folder / "more.yaml").write_text("extends: good.yaml\nvllm: {mode: server, server_port: 8000}\n")
    chosen = load_recipe(Path("more.yaml"), ("train.seed=3",)).chosen
    assert {"model.name_or_path", "vllm.mode", "vllm.server_port", "train.seed"} <= chosen
    assert not {"vllm.server_host", "vllm.gpu_memory_utilization", "vllm", "train.max_steps"} & chosen


def test_files_are_looked_for_only_if_asked(recipe_folder: Path) -> None:
    (recipe_folder / "prompts.jsonl").unlink()
    (recipe_folder / "table_rewards.py").unlink()
    with pytest.raises(RecipeError, match=r"dataset\.name"):
        load_recipe(Path("good.yaml"))
    assert load_recipe(Path("good.yaml"), look_for_files=False).recipe.dataset.name == "prompts.jsonl"
    with pytest.raises(RecipeError, match=r"train\.seed"):
        load_recipe(Path("good.yaml"), ("train.seed=x",), look_for_files=False)
