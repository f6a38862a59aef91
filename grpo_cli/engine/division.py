"""Who samples what: prompts in their order, cut into blocks of neighbours, one for each process."""

from bisect import bisect_left
from dataclasses import dataclass, replace

from grpo_cli.errors import TrainingError
from grpo_cli.recipe.schema import VllmSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How prompts are spread over the processes that sample.

    Attributes:
        rank: Of this process.
        processes: How many there are.
        engines: Rollout engines, each in an equal number of neighbouring processes, which ask it for the same.
        main_only: Whether the main process has the only one, such as a server that it talks to.
    """

    rank: int
    processes: int
    engines: int
    main_only: bool = False

    @property
    def members(self) -> int:
        """How many processes ask an engine for the same."""
        return 1 if self.main_only else self.processes // self.engines

    def asked(self, count: int) -> range:
        """Give the places of the prompts that this process asks its engine for, of so many prompts."""
        if self.main_only:
            return range(count if self.rank == 0 else 0)
        return _block(count, self.rank // self.members, self.engines)

    def kept(self, count: int) -> range:
        """Give those whose completions this process keeps, and no other does."""
        return self.asked(count) if self.main_only else self.even(count)

    def everyones(self, count: int) -> list[range]:
        """Give what each process keeps, by rank."""
        return [replace(self, rank=rank).kept(count) for rank in range(self.processes)]

    def holders(self, first: range, count: int) -> range:
        """Give the ranks that have some of the first prompts, where all have equally many; among them may be some that have none."""
        return range(
            bisect_left(range(self.processes), first.stop, key=lambda rank: _block(count, rank, self.processes).start)
        )

    def even(self, count: int) -> range:
        """Give this process's part where all have equally many, as far as that goes."""
        return _block(count, self.rank, self.processes)


def divide(vllm: VllmSection, *, rank: int, processes: int) -> Division:
    """Say which process samples what.

    Args:
        vllm: The recipe's section.
        rank: Of this process.
        processes: Of the run.

    Raises:
        TrainingError: As `count_engines` does.
    """
    engines = count_engines(vllm, processes)
    return Division(rank=rank, processes=processes, engines=engines, main_only=vllm.mode == "server")


def count_engines(vllm: VllmSection, processes: int) -> int:
    """Count the engines that sample in a run; each is in an equal number of its processes.

    Args:
        vllm: The recipe's section.
        processes: Of the run.

    Raises:
        TrainingError: If an engine is to be spread over a number of processes by which theirs cannot be divided.
    """
    if vllm.mode == "server":  # one process talks to the servers, which may be many
        return 1
    if vllm.mode is None:
        return processes
    size = vllm.tensor_parallel_size
    if processes % size:
        allowed = [str(number) for number in range(1, processes + 1) if processes % number == 0]
        raise TrainingError(
            f"vllm.tensor_parallel_size: found {size}, but this run has {processes} process{'es' if processes > 1 else ''}, which "
            f"vllm.mode: colocate spreads each engine over; allowed: {', '.join(allowed)}",
            hint=f"start it with --nproc {size}, or a multiple of {size}",
        )
    return processes // size


def _block(count: int, number: int, blocks: int) -> range:
    return range(count * number // blocks, count * (number + 1) // blocks)
