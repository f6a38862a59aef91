"""Processes of which only the first one talks to what samples: it samples everything, and the others train on their share all the same."""

from pathlib import Path
from typing import Any

import pytest
from e2e.experiment import completions, make_experiment
from engine.copying_engine import CopyingEngine
from many_processes import assert_close, overrides, train_in_forked
from warm_start import WarmStart

from grpo_cli.engine.run import run
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SERVED = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
from engine.copying_engine import CopyingEngine
from grpo_cli.engine import vllm_rollouts
vllm_rollouts.open_servers = lambda inputs, policy, told, stack: CopyingEngine(policy.model, inputs.tokenizer, max_num_seqs=64)
"""


def served(inputs: Any, policy: Any, told: object, stack: object) -> CopyingEngine:
    """Stand in for a server: an engine with a copy of the weights."""
    return CopyingEngine(policy.model, inputs.tokenizer, max_num_seqs=64)


def test_what_one_process_samples_is_trained_by_all(
    warm: WarmStart, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored by the first process, or by each that gets a part; weights and checks of them reach the engine in both."""
    experiment = make_experiment(
        tmp_path,
        tiny_model_folder,
        rewards={"reward_funcs": ["my_rewards.few_letters", "my_rewards.early"]},
        grpo={"num_generations": 3, "num_iterations": 2},
        train={"prompts_per_step": 3, "max_steps": 4, "learning_rate": 0.001},
        vllm={"mode": "server", "canary_steps": 1},
    )
    monkeypatch.setattr("grpo_cli.engine.vllm_rollouts.open_servers", served)
    run(load_recipe(experiment.recipe, overrides({"train.output_dir": experiment.output("one")})))
    changes: dict[str, dict[str, object]] = {"two": {}, "spread": {"rewards.spread": True}}
    jobs = [
        (experiment.recipe, {**more, "train.output_dir": experiment.output(name)}, None)
        for name, more in changes.items()
    ]
    train_in_forked(warm, 2, jobs, before=SERVED)
    for name in changes:
        assert_close(experiment.output(name), experiment.output("one"), but=("canary/", "sync/"))
        answers = [
            [[row["answer"] for row in rows] for rows in completions(experiment.output(one)).values()]
            for one in (name, "one")
        ]
        assert answers[0] == answers[1]
