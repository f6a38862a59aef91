"""A rollout engine that is lost in the middle of a run costs time, and nothing else: not a sample, a reward or a random number."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.experiment import Experiment, completions, make_experiment, records, timeless, weights
from engine.copying_engine import CopyingEngine, NamedWeights
from torch import Tensor

from grpo_cli.engine.inputs import Inputs
from grpo_cli.engine.run import run
from grpo_cli.errors import Interrupted, TrainingError
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.recipe.load import load_recipe
from grpo_cli.rollout.engine import EngineLostError, OnGroup
from grpo_cli.telemetry.recorder import Recorder
from grpo_cli.types import Group, PolicyVersion, Prompt, Sampling, SyncReport

CHANGED = ("sync/", "canary/", "rollout/recoveries")
"""Metrics that a recovery shows in."""


class MortalEngine(CopyingEngine):
    """Dies at some of its calls, and has weights that are none from then on.

    Args:
        dies_at: Calls of `generate` and `sync` together, from 1, in which it dies.
        forgets: Take the weights only when there are none yet, so that after a death only the check can help.
    """

    def __init__(self, model: Any, tokenizer: Any, *, dies_at: Collection[int] = (), forgets: bool = False) -> None:
        super().__init__(model, tokenizer, lie=lambda given, _: self._taken(given), max_num_seqs=64)
        self.dies_at, self.forgets = dies_at, forgets
        self.told: list[str] = []
        self.lost: list[EngineLostError] = []
        self._alive = True

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        seed_key: tuple[int | str, ...],
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        groups = super().generate(
            prompts, sampling, num_generations=num_generations, seed_key=seed_key, on_group=on_group
        )
        self._live(str(seed_key[1]))
        return groups

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> SyncReport:
        report = super().sync(named_weights, version)
        self._live("sync")
        return report

    def _live(self, what: str) -> None:
        assert self._alive, "it was asked before it was revived"
        self.told.append(what)
        if len(self.told) in self.dies_at:
            self._alive = False
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter.add_(1.0)
            raise EngineLostError(f"it died in call {len(self.told)}", hint="look after it")

    def _taken(self, given: NamedWeights) -> NamedWeights | None:
        return None if self.forgets and self.lost else given


class Phoenix(MortalEngine):
    """Can be revived."""

    def revive(self, lost: EngineLostError) -> None:
        assert not self._alive
        self._alive = True
        self.lost.append(lost)


def train(
    experiment: Experiment,
    output: str,
    *overrides: str,
    resume: str | None = None,
    kind: type[MortalEngine] = Phoenix,
    **engine: Any,
) -> Any:
    """Train with a mortal engine, and give it."""
    engines = []

    def mortal(inputs: Inputs, policy: PolicyModel, recorder: Recorder) -> MortalEngine:
        engines.append(kind(policy.model, inputs.tokenizer, **engine))
        return engines[-1]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("grpo_cli.engine.vllm_rollouts.open_colocated", mortal)
        given = ("vllm.mode=colocate", "vllm.importance_sampling_correction=false", *overrides)
        run(load_recipe(experiment.recipe, [f"train.output_dir={experiment.output(output)}", *given]), resume=resume)
    return engines[0]


def unchanged(output: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(CHANGED)} for record in timeless(output)
    ]


def recoveries(output: Path) -> dict[int, float]:
    """Count them by step."""
    return {
        record["step"]: record["rollout/recoveries"] for record in records(output) if "rollout/recoveries" in record
    }


def assert_nothing_was_lost(experiment: Experiment, output: str, whole: str) -> None:
    """Compare with an undisturbed run, bit for bit."""
    mine, theirs = experiment.output(output), experiment.output(whole)
    assert unchanged(mine) == unchanged(theirs)
    assert repr(completions(mine)) == repr(completions(theirs))
    other = weights(theirs)
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights(mine).items())


@pytest.fixture
def experiment(tiny_model_folder: Path, tmp_path: Path) -> Experiment:
    """Its rewards draw from the global generators and count their calls; it evaluates too."""
    held_out = {"dataset": {"name": "data.jsonl", "max_rows": 2}, "every": 3}
    return make_experiment(tmp_path, tiny_model_folder, eval=held_out)


@pytest.mark.slow
def test_a_run_whose_engine_dies_is_the_same_run(experiment: Experiment) -> None:
    whole = train(experiment, "whole")
    assert whole.told[:6] == ["sync", "canary", "eval", "train", "sync", "train"]
    for number, after in enumerate(["eval", "eval", "eval", "train", "train", "train"], start=1):
        engine = train(experiment, f"dies-{number}", dies_at=[number])
        assert [lost.message for lost in engine.lost] == [f"it died in call {number}"]
        assert engine.told[number : number + 3] == ["sync", "canary", after]
        assert_nothing_was_lost(experiment, f"dies-{number}", "whole")
        step = 1 if number <= 4 else 2
        assert recoveries(experiment.output(f"dies-{number}")) == {step: 1}


def test_it_may_die_again_while_it_recovers(experiment: Experiment) -> None:
    train(experiment, "whole")
    engine = train(experiment, "run", dies_at=[4, 5, 7, 12])
    assert engine.told[3:10] == ["train", "sync", "sync", "canary", "sync", "canary", "train"]
    assert_nothing_was_lost(experiment, "run", "whole")
    assert recoveries(experiment.output("run")) == {1: 3, 2: 1}


def test_one_that_never_samples_is_given_up_and_nothing_is_lost(
    experiment: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(experiment, "whole")
    third = 1 + [number for number, what in enumerate(whole.told, start=1) if what == "train"][1]
    with pytest.raises(TrainingError) as caught:
        train(experiment, "run", dies_at=range(third, third + 4))
    assert caught.value.exit_code == 4
    assert caught.value.message == (
        f"the rollout engine was lost 4 times and sampled nothing in between; the last time: it died in call {third + 3}"
    )
    assert caught.value.hint == "look after it"
    assert "stopped at step 2 of 6" in capsys.readouterr().out
    train(experiment, "run", resume="newest")
    assert_nothing_was_lost(experiment, "run", "whole")


def test_one_that_comes_back_with_other_weights_is_found_out(experiment: Experiment) -> None:
    with pytest.raises(TrainingError, match="does not sample from the trained weights: with those of step 1"):
        train(experiment, "run", "vllm.canary_steps=0", dies_at=[6], forgets=True)


def test_waiting_for_it_can_be_interrupted(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(engine: Phoenix, lost: EngineLostError) -> None:
        raise Interrupted(15)

    monkeypatch.setattr(Phoenix, "revive", interrupted)
    with pytest.raises(Interrupted):
        train(experiment, "run", dies_at=[8])
    monkeypatch.undo()
    train(experiment, "run", resume="newest")
    train(experiment, "whole")
    assert_nothing_was_lost(experiment, "run", "whole")


def test_an_engine_that_cannot_be_revived_ends_the_run_by_its_own_words(experiment: Experiment) -> None:
    with pytest.raises(EngineLostError, match="it died in call 6"):
        train(experiment, "run", dies_at=[6], kind=MortalEngine)
