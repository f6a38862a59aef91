"""What is not real about a simulated rank: there is no network, the policy costs nothing, and nobody exchanges gradients."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.merging import kinds_of
from grpo_cli.metrics import Metrics
from grpo_cli.types import Segment, TokenStats

CPU = torch.device("cpu")
_SILENCE = (torch.empty(0), torch.empty(0))


class SimulatedProcesses(Processes):
    """The processes of a run, seen from one of them. Only the transport is not real.

    What the others would have brought into an exchange is there beforehand, in the order of the exchanges; if nothing is, they bring
    nothing.

    Args:
        rank: Which one this is.
        count: How many there are.

    Attributes:
        told_bytes: What the others have brought into collectives so far, of all of which every process gets the result.
        sent_bytes: What they have sent to this one alone, and how long it is.
        exchanges: How often processes have waited for each other.
    """

    def __init__(self, *, rank: int, count: int) -> None:
        self.rank, self.count, self._group, self._kinds = rank, count, None, {}
        self._arriving: deque[tuple[Tensor, Tensor]] = deque()
        self._sent: deque[Mapping[int, bytes]] = deque()
        self._row = self._rows = torch.empty(0)
        self.told_bytes = self.sent_bytes = self.exchanges = 0

    @property
    def device(self) -> torch.device:
        """The processor."""
        return CPU

    def rows_to_main(self, row: Tensor, width: int) -> Tensor | None:  # noqa: ARG002  it is known beforehand
        """Get what the others bring, if this is the main process."""
        self.exchanges += self.count > 1
        if not self.is_main:
            return None
        self.sent_bytes += self._rows.nbytes
        return torch.cat([row[None], self._rows[1:]])

    def row_from_main(self, rows: Tensor | None, width: int) -> Tensor:  # noqa: ARG002  it is known beforehand
        """Hand rows out, or give what the main process has for this one."""
        self.exchanges += self.count > 1
        if rows is not None:
            return rows.unbind()[0]
        self.sent_bytes += self._row.nbytes
        return self._row.clone()

    def know(self, metrics: Metrics) -> None:
        """Have merged such metrics before."""
        self._kinds = kinds_of(metrics)

    def others_are_silent(self, times: int) -> None:
        """Have the others add zeros in the next sums."""
        self._arriving.extend([_SILENCE] * times)

    def others_add(self, values: Tensor) -> None:
        """Have the others add something in the next sum."""
        if self.count > 1:
            self._arriving.append((values, torch.empty(0)))

    def main_tells(self, message: bytes) -> None:
        """Have a message there for a `from_main`, unless this is the main one."""
        if self.rank > 0:
            self._arriving.append((_lengths([message]), _lengths([])))
            self._arriving.append((_bytes([message]), _bytes([])))

    def others_bring(self, rows: Tensor) -> None:
        """Have the rows of all processes there for `rows_to_main`; this one's own is not looked at."""
        self._rows = rows

    def main_has_for_this(self, row: Tensor) -> None:
        """Have a row there for `row_from_main`."""
        self._row = row

    def others_send(self, messages: Mapping[int, bytes]) -> None:
        """Have messages there for a `send`, by the rank of who sent them."""
        self._sent.append(messages)

    def _pass(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        """Write to memory what the others have sent: first how long it is, then itself."""
        self.exchanges += bool(out or into)
        if not into:
            return
        lengths = all(one.dtype == torch.int64 for one in into.values())
        sent = self._sent[0] if lengths else self._sent.popleft()
        for rank, one in into.items():
            self.sent_bytes += one.nbytes
            one.copy_(_lengths([sent[rank]]) if lengths else _bytes([sent[rank]]))

    def _exchange(self, collective: Any, *arguments: Any, **options: Any) -> None:  # noqa: ARG002  all of them bring something
        """Put what the others have sent where the transport would; this process has zeros there, or is the main one."""
        self.exchanges += 1
        if options.get("op") in {torch.distributed.ReduceOp.MIN, torch.distributed.ReduceOp.MAX}:
            return  # no other has less, or more
        (values,) = arguments
        before, after = self._arriving.popleft() if self._arriving else _SILENCE
        self.told_bytes += before.nbytes + after.nbytes
        if len(before):
            values[: len(before)] += before
        if len(after):
            values[-len(after) :] += after


class ToldError(Exception):
    """What a process tells or sends, before anybody answers.

    Args:
        told: That.
    """

    def __init__(self, told: Any) -> None:
        super().__init__(told)
        self.told = told


class OverheardProcesses(SimulatedProcesses):
    """Ends at something that this process tells others, and says what it is.

    Args:
        rank: Which one this is.
        count: How many there are.
        passing: How many messages it sends, or as the main one tells all, before that.
    """

    def __init__(self, *, rank: int, count: int, passing: int = 0) -> None:
        super().__init__(rank=rank, count=count)
        self._passing = passing

    def send(self, messages: Mapping[int, bytes], *, sources: Sequence[int]) -> dict[int, bytes]:
        """Send."""
        self._end_at((messages, sources))
        return super().send(messages, sources=sources)

    def rows_to_main(self, row: Tensor, width: int) -> Tensor | None:
        """Tell the main process."""
        self._end_at(row)
        return super().rows_to_main(row, width)

    def from_main(self, message: bytes | None) -> bytes:
        """Tell, or be told."""
        if self.is_main:
            self._end_at(message)
        return super().from_main(message)

    def _end_at(self, told: Any) -> None:
        if not self._passing:
            raise ToldError(told)
        self._passing -= 1


def overheard(call: Callable[[], object]) -> Any:
    """Give what a call with `OverheardProcesses` tells."""
    try:
        call()
    except ToldError as error:
        return error.told
    raise AssertionError("it told nothing")


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
