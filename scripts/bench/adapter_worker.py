"""A measured process that trains all weights, adapters, or adapters on quantized weights: what its memory goes to.

A real run's stages, built from a recipe as `grpo train` builds them, taken through one optimizer step at a time. Linux only.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from bench.grpo_worker import load_inputs, open_recorder
from bench.measure import Meter, resident_bytes
from bench.worker import serve
from grpo_cli.engine.build import build_stages, load_policy
from grpo_cli.engine.clock import Clock
from grpo_cli.engine.export import save_checkpoint
from grpo_cli.engine.generation import generate
from grpo_cli.engine.inputs import Inputs
from grpo_cli.engine.libraries import quiet_libraries
from grpo_cli.engine.randomness import RandomState
from grpo_cli.engine.settings import loop_settings
from grpo_cli.engine.state import RunState
from grpo_cli.policy.load import load_model, load_shapes
from grpo_cli.recipe.load import load_recipe

PAGE = 4096


class DeviceMemory:
    """Bytes that this process has: of a GPU what its tensors take, else resident memory beyond that of the libraries.

    Args:
        device: Where the model goes.

    Attributes:
        most: Of the last `watched` time.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._libraries = 0 if self._on_gpu else resident_bytes()
        self.most = 0

    @property
    def held(self) -> int:
        """Now, after everything that can be given back has been."""
        resident = resident_bytes()
        return torch.cuda.memory_allocated() if self._on_gpu else resident - self._libraries

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch for the most there is at one time."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            yield
            self.most = torch.cuda.max_memory_allocated()
            return
        meter = Meter()
        with meter.part("watched"):
            yield
        self.most = meter.parts["watched"].peak_bytes - self._libraries


def needed(recipe: str, changes: Sequence[str], steps: int) -> dict[str, float]:
    """Load a model, train it for some steps, and tell bytes by what they are for, and the seconds of each step but the first.

    Returns:
        `weights` after loading and `loading` at most meanwhile; `kept` between two steps and `step` at most during one, both on top of
        the weights; `checkpoint` on disk; `seconds` of the fastest step.
    """
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        loaded = load_recipe(Path(recipe), [*changes, f"train.output_dir={folder}/run"])
        inputs = load_inputs(loaded)
        load_shapes(loaded.recipe.model, folder=loaded.folder)  # imports what belongs to the libraries
        memory = DeviceMemory(inputs.processes.device)
        weights, loading = _weights(inputs, memory)
        stages = build_stages(inputs, load_policy(inputs), open_recorder(inputs, asdict(loaded.recipe)), stack)
        settings = loop_settings(loaded.recipe, output_dir=inputs.output_dir, length=inputs.length)
        state = RunState(random=RandomState.capture())
        seconds = []
        for number in range(1, steps + 1):
            began = time.perf_counter()
            with memory.watched():
                groups, logps = generate(stages, settings, state, Clock(lambda _: None)).window.at(0)
                stages.gradients.accumulate(stages.prepared, groups, logps)
                stages.strategy.apply()
                stages.schedule.step()
            seconds.append(time.perf_counter() - began)
            state = replace(state, step=number)
        del groups, logps
        kept = memory.held - weights
        save_checkpoint(stages, state)
        files = (path for path in stages.checkpoints.path(steps).rglob("*") if path.is_file())
        return {
            "weights": weights,
            "loading": loading,
            "kept": kept,
            "step": memory.most - weights - kept,
            "checkpoint": sum(path.stat().st_size for path in files),
            "seconds": min(seconds[1:]),
        }


def _weights(inputs: Inputs, memory: DeviceMemory) -> tuple[int, int]:
    """Load a recipe's model and let go of it; give the bytes that it held, and the most meanwhile."""
    recipe = inputs.recipe
    with memory.watched():
        model = load_model(recipe.model, folder=inputs.folder, device=inputs.processes.device)
        _read(model)
    return memory.held, memory.most


def _read(model: nn.Module) -> None:
    """Read a number of each page: on a CPU weights may be a file that is mapped into memory, of which only what was read is there."""
    for weight in model.parameters():
        numbers = weight.detach().flatten()
        numbers[:: max(1, PAGE // numbers.element_size())].sum()


if __name__ == "__main__":
    serve({"needed": needed})
