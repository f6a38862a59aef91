"""A measured process that samples: a run's engine, weights and sampling, built from a recipe as `grpo train` builds them.

A turn is what such a run does before each optimizer step: the newest weights for the engine, then completions. Nothing ends a
completion before its last token, so that all engines sample the same number of tokens.
"""

import dataclasses
import json
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from bench.grpo_worker import load_inputs, open_recorder, write_prompts
from bench.measure import Cost
from bench.worker import serve
from bench.workload import Workload
from grpo_cli.engine.build import build_stages, load_policy
from grpo_cli.engine.stages import Stages
from grpo_cli.metrics import results
from grpo_cli.recipe.load import load_recipe
from grpo_cli.types import PolicyVersion, Prompt, PromptId


class TreeMeter:
    """Takes processor and wall time of this process and all that it has started, however deep."""

    def __init__(self) -> None:
        self.parts: dict[str, Cost] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure one part."""
        cpu, wall = _tree_cpu_seconds(), time.perf_counter()
        yield
        wall = time.perf_counter() - wall
        self.parts[name] = Cost(cpu_seconds=_tree_cpu_seconds() - cpu, wall_seconds=wall)


def _tree_cpu_seconds() -> float:
    """Add up the processor time of a tree of processes; those that ended are counted by their parents. It has steps of 10 ms."""
    this = psutil.Process()
    seconds = 0.0
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def take_turn(stages: Stages, workload: Workload, number: int) -> dict[str, Any]:
    """Give the engine the weights as those of another step, have it sample, and tell what both took."""
    meter, version = TreeMeter(), PolicyVersion(number)
    prompts = [
        Prompt(uid=PromptId(f"0:{row}"), ids=tuple(ids), text=text, messages=None, row={})
        for row, (text, ids) in enumerate(zip(workload.prompts, workload.prompt_ids, strict=True))
    ]
    length, num_generations = workload.longest_completion, len(workload.completion_ids[0])
    sampling = dataclasses.replace(stages.sampling, stop_ids=(), max_tokens=length)
    with meter.part("sync"):
        stages.weight_sync.bring(version)
    with meter.part("generate"):
        groups = stages.weight_sync.sample(
            version, prompts, sampling, num_generations=num_generations, seed_key=("bench", number)
        )
    completions = [completion for group in groups for completion in group.completions]
    assert len(completions) == len(workload.rows)
    assert {len(one.ids) for one in completions} == {length}, "a completion ended where nothing was to end it"
    assert {one.policy_version for one in completions} == {version}, "these are not from the newest weights"
    metrics = results(stages.weight_sync.take_metrics())
    assert not metrics.get("rollout/recoveries"), "the engine died and was started again meanwhile: the log says why"
    return {
        "parts": {name: dataclasses.asdict(cost) for name, cost in meter.parts.items()},
        "sync_bytes": metrics["sync/bytes"],
    }


def open_stages(model: str, workload: Workload, vllm: Mapping[str, Any], stack: ExitStack) -> Stages:
    """Build a run, of which nothing will be trained.

    Args:
        model: As `model.name_or_path`.
        workload: The one with the longest prompts.
        vllm: The recipe's section.
        stack: Ends what was started.
    """
    folder = Path(tempfile.mkdtemp(prefix="grpo-bench-"))
    recipe = {
        "model": {"name_or_path": model},
        "dataset": {"name": "prompts.jsonl", "shuffle": False},
        "rewards": {"reward_funcs": ["bench.rewards.letter_share"]},
        "grpo": {"num_generations": len(workload.completion_ids[0]), "beta": 0.0},
        "generation": {"max_completion_length": workload.longest_completion},
        "vllm": vllm,
        "train": {"output_dir": str(folder / "run"), "prompts_per_step": len(workload.prompts), "max_steps": 1},
    }
    write_prompts(folder, workload)
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    inputs = load_inputs(load_recipe(folder / "recipe.yaml"))
    return build_stages(inputs, load_policy(inputs), open_recorder(inputs, recipe), stack)


def vllm_section(engine: str) -> dict[str, Any]:
    """Give the recipe's section for `local`, `colocate` or `server`."""
    if engine == "local":
        return {}
    started = {"start": True, "server_port": _free_port()} if engine == "server" else {}
    return {"mode": engine, "canary_steps": 0, **started}  # the first weights are checked, and nothing is measured yet


def _free_port() -> int:
    """Find a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RolloutWorker:
    """The calls that this process answers.

    Args:
        stack: Ends what they start.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._stages: Stages | None = None

    def load(self, *, model: str, engine: str, longest: dict[str, Any], small: dict[str, Any]) -> None:
        """Open an engine, and let it sample once, after which nothing is new to it.

        Args:
            model: As `model.name_or_path`.
            engine: Of `vllm_section`.
            longest: The workload with the longest prompts.
            small: What to sample now.
        """
        self._stages = open_stages(model, Workload(**longest), vllm_section(engine), self._stack)
        take_turn(self._stages, Workload(**small), 0)

    def turn(self, *, workload: dict[str, Any], number: int) -> dict[str, Any]:
        """Take a turn; its number is that of no other."""
        assert self._stages is not None
        return take_turn(self._stages, Workload(**workload), number)


if __name__ == "__main__":
    with ExitStack() as opened:
        worker = RolloutWorker(opened)
        serve({"load": worker.load, "turn": worker.turn})
