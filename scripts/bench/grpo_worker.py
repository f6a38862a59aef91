"""The measured process of this project: a real run's stages, taken through one optimizer step at a time.

Everything is built from a recipe, as `grpo train` builds it. Changed is only what makes the step the same as TRL's: completions end
at given lengths, and once they are sampled (that work is done and measured), the workload's tokens take their place.
"""

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.measure import Meter, multiplication_rates, resident_bytes, weight_bytes
from bench.worker import serve
from bench.workload import Workload
from grpo_cli.engine.build import build_stages, load_policy
from grpo_cli.engine.clock import Clock
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.generation import generate
from grpo_cli.engine.inputs import Inputs
from grpo_cli.engine.prompts import load_prompts
from grpo_cli.engine.randomness import RandomState
from grpo_cli.engine.run_length import run_length
from grpo_cli.engine.settings import loop_settings
from grpo_cli.engine.stages import LoopSettings, Stages
from grpo_cli.engine.state import RunState
from grpo_cli.engine.strategies.replicas import Replicas
from grpo_cli.engine.vision import VisionLoader
from grpo_cli.engine.weight_sync import WeightSync
from grpo_cli.metrics import results
from grpo_cli.policy.load import load_tokenizer
from grpo_cli.recipe.load import LoadedRecipe, load_recipe
from grpo_cli.recipe.schema import Recipe
from grpo_cli.rollout.engine import OnGroup, RolloutEngine
from grpo_cli.rollout.local.stops import StopCheck
from grpo_cli.scoring.functions import load_rewards
from grpo_cli.scoring.runtime import RewardScorer
from grpo_cli.telemetry.console import open_console, open_view
from grpo_cli.telemetry.recorder import Recorder
from grpo_cli.types import Completion, Group, PolicyVersion, Prompt, Sampling, SyncReport

PROMPTS_FILE = "prompts.jsonl"


class ForcedLengths:
    """Ends completions at given lengths, and nowhere else.

    A completion is recognised by its tokens so far, so it does not matter how the engine orders and batches its rows. Where two
    completions begin alike, either may take either length: the lengths of the whole stay the same.

    Args:
        lengths: One per completion, in the order in which the engine samples first tokens.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._waiting: dict[tuple[int, ...], list[int]] = {(): list(reversed(lengths))}

    def ended(self, completions: Sequence[Sequence[int]]) -> list[bool]:
        """Answer as `StopCheck.ended` does."""
        ended = []
        for ids in completions:
            length = self._waiting[tuple(ids[:-1])].pop()
            ended.append(len(ids) >= length)
            if not ended[-1]:
                self._waiting.setdefault(tuple(ids), []).append(length)
        return ended


class ForcedEngine:
    """The run's own engine; the workload's tokens replace what it sampled. See `RolloutEngine`.

    Args:
        engine: It does the work.
        workload: What the result is to be.
        tokenizer: Decodes the tokens that are exchanged.
    """

    weight_copies = 0

    def __init__(self, engine: RolloutEngine, workload: Workload, tokenizer: Any) -> None:
        self._engine = engine
        self._workload = workload
        self._tokenizer = tokenizer

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        seed_key: tuple[int | str, ...],
        on_group: OnGroup | None = None,  # noqa: ARG002  the tokens are not these
    ) -> list[Group]:
        """Sample, check that the lengths are as told, and exchange the tokens."""
        wanted = [list(prompt.ids) for prompt in prompts]
        assert wanted == self._workload.prompt_ids, "the prompts are not those of the workload"
        stops = ForcedLengths([len(ids) for ids in self._workload.rows])
        with patch.object(StopCheck, "ended", lambda _, completions: stops.ended(completions)):
            groups = self._engine.generate(prompts, sampling, num_generations=num_generations, seed_key=seed_key)
        sampled = sorted(len(completion.ids) for group in groups for completion in group.completions)
        assert sampled == sorted(len(ids) for ids in self._workload.rows), "the engine did not end where it was told to"
        return [
            dataclasses.replace(group, completions=tuple(map(self._exchanged, group.completions, rows)))
            for group, rows in zip(groups, self._workload.completion_ids, strict=True)
        ]

    def _exchanged(self, completion: Completion, ids: Sequence[int]) -> Completion:
        """Exchange tokens and text; the log-probabilities they were sampled with are not read in an on-policy step."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return dataclasses.replace(completion, ids=tuple(ids), logps=torch.zeros(len(ids)), text=text)

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> SyncReport:
        """Pass it on."""
        return self._engine.sync(named_weights, version)

    def rest(self) -> None:
        """Pass it on."""
        self._engine.rest()

    def close(self) -> None:
        """Pass it on."""
        self._engine.close()


class MeasuredClock(Clock):
    """A step's clock that takes the cost of each phase.

    Args:
        meter: Where the costs go. The first pass over the completions is the reference's, for an on-policy step has no other.
    """

    NAMES = {"sync": "sync", "generate": "generate", "score": "score", "forward_backward": "reference"}  # noqa: RUF012  never changed

    def __init__(self, meter: Meter) -> None:
        super().__init__(lambda _: None)
        self._meter = meter

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase under the name that both sides use."""
        with self._meter.part(self.NAMES[name]):
            yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A built run and where its prompts come from."""

    recipe: Recipe
    folder: Path
    stages: Stages
    settings: LoopSettings

    def step(self, workload: Workload) -> dict[str, Any]:
        """Do one optimizer step and tell what it took."""
        recipe = self.recipe
        write_prompts(self.folder, workload)
        vision = VisionLoader(recipe.model, folder=self.folder)
        prompts = load_prompts(
            recipe.dataset, self.stages.tokenizer, vision=vision, folder=self.folder, seed=recipe.train.seed
        )
        engine = ForcedEngine(self.stages.weight_sync.rollouts, workload, self.stages.tokenizer)
        weight_sync = WeightSync(engine, (), canary=None, sampling=self.stages.processes.autocast)
        stages = dataclasses.replace(self.stages, prompts=prompts.source, weight_sync=weight_sync)
        state = RunState(random=RandomState.capture())
        meter = Meter()
        resident_bytes()
        with meter.part("whole_step"):
            window = generate(stages, self.settings, state, MeasuredClock(meter)).window
            groups, logps = window.at(0)
            with meter.part("train_step"):
                gradient = stages.gradients.accumulate(stages.prepared, groups, logps)
            norm = stages.strategy.apply()
            stages.schedule.step()
        metrics = results(gradient.metrics)
        return {
            "parts": {name: dataclasses.asdict(cost) for name, cost in meter.parts.items()},
            "gradient_norm": norm,
            "tokens_useful": metrics["tokens/useful"],
            "tokens_computed": metrics["tokens/computed"],
        }


def open_run(model: str, workload: Workload, *, beta: float, gradient_checkpointing: bool | str) -> Run:
    """Build the stages of a run with a choice of `train.gradient_checkpointing`. The learning rate is 0, so that every step is the same."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-bench-"))
    recipe = {
        "model": {"name_or_path": model},
        "dataset": {"name": PROMPTS_FILE, "shuffle": False},
        "rewards": {"reward_funcs": ["bench.rewards.letter_share"]},
        "grpo": {"num_generations": len(workload.completion_ids[0]), "beta": beta},
        "generation": {"max_completion_length": workload.longest_completion},
        "train": {
            "output_dir": str(folder / "run"),
            "prompts_per_step": len(workload.prompts),
            "max_steps": 1_000_000,
            "learning_rate": 0.0,
            "gradient_checkpointing": gradient_checkpointing,
        },
    }
    write_prompts(folder, workload)
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    loaded = load_recipe(folder / "recipe.yaml")
    inputs = load_inputs(loaded)
    stages = build_stages(inputs, load_policy(inputs), open_recorder(inputs, recipe), ExitStack())
    settings = loop_settings(loaded.recipe, output_dir=inputs.output_dir, length=inputs.length)
    return Run(recipe=loaded.recipe, folder=folder, stages=stages, settings=settings)


def open_recorder(inputs: Inputs, recipe: Mapping[str, Any]) -> Recorder:
    """Make what a run is told to."""
    return Recorder(
        output_dir=inputs.output_dir,
        settings=inputs.recipe.logging,
        view=open_view(open_console(), inputs.length.total_steps),
        reward_names=inputs.scorer.names,
        run_name=inputs.recipe.run_name,
        recipe=recipe,
    )


def load_inputs(loaded: LoadedRecipe) -> Inputs:
    """Load everything but the model."""
    recipe, folder = loaded.recipe, loaded.folder
    processes = Processes(bf16=recipe.train.bf16)
    rewards = load_rewards(recipe.rewards, folder=folder, device=processes.device)
    tokenizer = load_tokenizer(recipe.model, folder=folder)
    vision = VisionLoader(recipe.model, folder=folder)
    prompts = load_prompts(recipe.dataset, tokenizer, vision=vision, folder=folder, seed=recipe.train.seed)
    return Inputs(
        recipe=recipe,
        folder=folder,
        output_dir=Path(recipe.train.output_dir),
        checkpoint=None,
        processes=processes,
        strategy=Replicas(processes),
        tokenizer=tokenizer,
        vision=vision.loaded,
        prompts=prompts,
        held_out=(),
        scorer=RewardScorer(rewards),
        length=run_length(recipe.train, recipe.grpo, rows=prompts.source.rows_per_epoch),
    )


def write_prompts(folder: Path, workload: Workload) -> None:
    """Make a workload's prompts the run's dataset."""
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in workload.prompts)
    (folder / PROMPTS_FILE).write_text(rows, encoding="utf-8")


class GrpoWorker:
    """The calls that this process answers."""

    def __init__(self) -> None:
        self._run: Run | None = None

    def load(
        self, *, model: str, workload: dict[str, Any], beta: float, threads: int, gradient_checkpointing: bool | str
    ) -> dict[str, Any]:
        """Load the model and its reference, and tell the memory of the libraries and the weights alone."""
        torch.set_num_threads(threads)
        libraries = resident_bytes()
        self._run = open_run(model, Workload(**workload), beta=beta, gradient_checkpointing=gradient_checkpointing)
        stages = self._run.stages
        assert stages.reference is not None
        return {
            "level_bytes": libraries + weight_bytes(stages.policy, stages.reference.policy),
            "trained_bytes": weight_bytes(stages.policy),
        }

    def step(self, *, workload: dict[str, Any]) -> dict[str, Any]:
        """Do one optimizer step."""
        assert self._run is not None
        return self._run.step(Workload(**workload))


if __name__ == "__main__":
    worker = GrpoWorker()
    serve({"load": worker.load, "step": worker.step, "multiplication_rates": multiplication_rates})
