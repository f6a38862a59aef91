"""A measured process that plays ranks of many. Each number of ranks has a process of its own, so that none has another's memory."""

import gc
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from datasets import disable_progress_bars

from bench.scale_rank import MAIN_STAGES, RANK_PARTS, RANK_STAGES, REWARDED_STAGES, SCORING_STAGES, SimulatedStep
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
        self._step: SimulatedStep | None = None

    def load(self, *, count: int) -> None:
        """Make up a step of so many ranks, and play two of them once, after which nothing is new to them."""
        rows, builder = prompt_rows(PROMPTS_PER_RANK * count), prompt_builder()
        sampler = PromptSampler(rows, builder, preflight(rows, builder), seed=0, shuffle=True)
        self._step = SimulatedStep(count, sampler, PROMPTS_PER_RANK)
        self.turn()

    def turn(self) -> dict[str, float]:
        """Play the rank in the middle again, and what the main one does besides.

        Returns:
            The seconds of each stage, and of each part. A stage is left out if there is nothing to do.
        """
        assert self._step is not None
        step, rank = self._step, self._step.count // 2
        seconds = {}
        for name, prepare in {**RANK_STAGES, **RANK_PARTS, **REWARDED_STAGES}.items():
            call = prepare(step, rank)
            if call is not None:
                seconds[name], _ = timed(call)
        for name, prepare_main in {**MAIN_STAGES, **SCORING_STAGES}.items():
            call = prepare_main(step)
            if call is not None:
                seconds[name], _ = timed(call)
        return seconds

    def exchanges(self) -> dict[str, tuple[int, int]]:
        """Play the rank in the middle once more.

        Returns:
            How often it exchanges something in each stage, and the bytes that it gets then.
        """
        assert self._step is not None
        step, rank = self._step, self._step.count // 2
        found = {}
        for name, prepare in RANK_STAGES.items():
            call = prepare(step, rank)
            processes = step.processes
            before = processes.exchanges, processes.told_bytes + processes.sent_bytes
            if call is not None:
                call()
            after = processes.exchanges, processes.told_bytes + processes.sent_bytes
            found[name] = after[0] - before[0], after[1] - before[1]
        return found


if __name__ == "__main__":
    worker = ScaleWorker()
    serve({"load": worker.load, "turn": worker.turn, "exchanges": worker.exchanges})
