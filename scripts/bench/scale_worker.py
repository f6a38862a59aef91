"""A measured process that plays one rank of many. Each number of ranks has a process of its own, so that none has another's memory."""

import gc
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from datasets import disable_progress_bars

from bench.scale_rank import PARTS, STAGES, SimulatedRank
from bench.scale_step import PROMPTS_PER_RANK, prompt_builder, prompt_rows
from bench.worker import serve
from grpo_cli.data.preflight import preflight
from grpo_cli.data.sampler import PromptSampler

T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Measure the processor time of a call, which begins without garbage of earlier ones."""
    gc.collect()
    before = time.process_time()
    result = call()
    return time.process_time() - before, result


class ScaleWorker:
    """Answers `scale_compare`."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        disable_progress_bars()
        self._rank: SimulatedRank | None = None

    def load(self, *, count: int) -> None:
        """Make up a step of so many ranks, and play one of them once, after which nothing is new to it."""
        rows, builder = prompt_rows(PROMPTS_PER_RANK * count), prompt_builder()
        sampler = PromptSampler(rows, builder, preflight(rows, builder), seed=0, shuffle=True)
        self._rank = SimulatedRank(count, sampler)
        self.turn()

    def turn(self) -> dict[str, float]:
        """Play it again; give the seconds of each stage, and of each part. A stage is left out if there is nothing to do."""
        assert self._rank is not None
        seconds = {}
        for name, prepare in {**STAGES, **PARTS}.items():
            call = prepare(self._rank)
            if call is not None:
                seconds[name], _ = timed(call)
        return seconds


if __name__ == "__main__":
    worker = ScaleWorker()
    serve({"load": worker.load, "turn": worker.turn})
