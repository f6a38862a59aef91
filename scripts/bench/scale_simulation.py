"""What is not real about a simulated rank: there is no network, the policy costs nothing, and nobody exchanges gradients."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from grpo_cli.engine.distributed import Processes
from grpo_cli.types import Segment, TokenStats

CPU = torch.device("cpu")


class SimulatedProcesses(Processes):
    """The processes of a run, seen from one of them. Only the transport is not real.

    Args:
        rank: Which one this is.
        count: How many there are.

    Attributes:
        told: The messages of this one.
    """

    def __init__(self, *, rank: int, count: int) -> None:
        self.rank, self.count, self._group = rank, count, None
        self.told: list[bytes] = []
        self._arriving: deque[tuple[Tensor, Tensor]] = deque()
        self._agreeing = 0

    @property
    def device(self) -> torch.device:
        """The processor."""
        return CPU

    def gather(self, message: bytes) -> list[bytes]:
        """Give the messages of all processes, and remember this one's."""
        self.told.append(message)
        if self._agreeing:
            self._agreeing -= 1
            self.others_tell([message] * self.count)
            self._arriving.rotate(2)
        return super().gather(message)

    def from_main(self, message: bytes | None) -> bytes:
        """Give the main process's message, and remember this one's."""
        self.told.append(message or b"")
        return super().from_main(message)

    def others_agree(self, times: int) -> None:
        """Have every process tell the same as this one in the next calls of `gather`."""
        self._agreeing = times if self.count > 1 else 0

    def others_tell(self, messages: Sequence[bytes]) -> None:
        """Have a message of each process there for a `gather`; this one's own is not looked at."""
        before, after = messages[: self.rank], messages[self.rank + 1 :]
        self._arriving.append((_lengths(before), _lengths(after)))
        self._arriving.append((_bytes(before), _bytes(after)))

    def main_tells(self, message: bytes) -> None:
        """Have a message there for a `from_main`."""
        self.others_add(_lengths([message]))
        self.others_add(_bytes([message]))

    def others_add(self, values: Tensor) -> None:
        """Have a tensor there that a `sum` adds."""
        self._arriving.append((values, values[:0]))

    def _exchange(self, collective: Any, *arguments: Any, **options: Any) -> None:  # noqa: ARG002  all of them bring something
        """Put what the others have sent where the transport would; this process has zeros there, or is the main one."""
        if options.get("op") == torch.distributed.ReduceOp.MIN:
            return  # no other has less
        (values,) = arguments
        before, after = self._arriving.popleft()
        values[: len(before)] += before
        values[len(values) - len(after) :] += after


def _lengths(messages: Sequence[bytes]) -> Tensor:
    return torch.tensor([len(one) for one in messages], dtype=torch.int64)


def _bytes(messages: Sequence[bytes]) -> Tensor:
    joined = bytearray(b"".join(messages))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)


class FreePolicy(nn.Module):
    """A policy that costs nothing: every token has the same log-probability."""

    def __init__(self) -> None:
        super().__init__()
        self.logp = nn.Parameter(torch.tensor(-1.0))

    def forward(self, segments: Sequence[Segment], **_: Any) -> TokenStats:
        """Give the statistics of the completion tokens."""
        tokens = sum(len(ids) for segment in segments for ids in segment.completion_ids)
        return TokenStats(
            logps=self.logp.expand(tokens), entropies=torch.ones(tokens), tokens_useful=tokens, tokens_computed=tokens
        )


class NoExchange:
    """A strategy that leaves gradients where they are: to exchange them is the transport's part."""

    in_step = False

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it

    def sum_gradients(self) -> None:
        """Exchange nothing."""
