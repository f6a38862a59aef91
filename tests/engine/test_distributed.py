"""What processes tell each other, in several real ones."""

import pytest
from many_processes import train_in_forked
from torch.distributed import DistBackendError
from warm_start import WarmStart

from grpo_cli.engine.distributed import telling_of_lost_processes
from grpo_cli.errors import LostProcessError

TELLING = """
import torch
from grpo_cli.engine.distributed import Processes
from grpo_cli.errors import RewardError, TrainingError
from grpo_cli.metrics import Max, Mean, Sum

processes = Processes(bf16=False)
rank, main = processes.rank, processes.is_main
assert processes.gather(b"") == [b""] * 3
assert processes.gather(bytes([255]) * 2 * rank) == [b"", b"\\xff" * 2, b"\\xff" * 4]
assert processes.gather(b"all of it" if main else b"") == [b"all of it", b"", b""]
assert processes.from_main(b"" if main else None) == b""
assert processes.from_main(b"told" if main else None) == b"told"
assert processes.from_main(b"told" if main else b"what the others have") == b"told"

rows = torch.full((rank, 2), -0.0 if rank == 1 else 0.5)
assert processes.everyones(rows).view(torch.int32).tolist() == torch.tensor([[-0.0] * 2, [0.5] * 2, [0.5] * 2]).view(torch.int32).tolist()
assert processes.everyones(torch.empty(0, dtype=torch.int64)).tolist() == []
sent = {other: b"from %d to %d" % (rank, other) for other in range(3) if other != 1}
sent[1] = b""
assert processes.send(sent, sources=range(3)) == {other: b"from %d to %d" % (other, rank) if rank != 1 else b"" for other in range(3)}
assert processes.send({2: b"x" * 70000} if main else {}, sources=[0] if rank == 2 else []) == ({0: b"x" * 70000} if rank == 2 else {})
assert processes.to_main(bytes([rank])) == ([b"\\x00", b"\\x01", b"\\x02"] if main else [])

assert (processes.least(rank), processes.most(rank), processes.most(rank / 2)) == (0, 2, 1.0)
rows = processes.rows_to_main(torch.tensor([rank, -rank]), 2)
assert rows.tolist() == [[0, 0], [1, -1], [2, -2]] if main else rows is None
matrix = torch.arange(6.0).view(3, 2) if main else None
assert processes.row_from_main(matrix, 2).tolist() == [2.0 * rank, 2.0 * rank + 1]

for _ in range(2):  # names are new at first
    merged = processes.merge({"all": Mean(rank, 1), "most": Max(-rank)} | ({"one": Sum(5)} if rank == 1 else {}))
    assert merged == {"all": Mean(3, 3), "most": Max(0), "one": Sum(5)}, merged

processes.check_same({"a": 1}, "settings")
processes.check_same(rank, "prompts", among=1)
try:
    processes.check_same("other" if rank == 2 else "same", "settings")
except TrainingError as error:
    assert error.message == "process 2 has other settings than process 0"
else:
    raise AssertionError
processes.raise_together(None, RewardError)
try:
    processes.raise_together(RewardError("it failed", hint="here") if rank == 1 else None, RewardError)
except RewardError as error:
    assert (error.message, error.hint) == ("it failed", "here")
else:
    raise AssertionError
"""


@pytest.mark.slow
def test_messages_of_any_lengths_arrive_as_they_were_sent(warm: WarmStart) -> None:
    train_in_forked(warm, 3, [], afterwards=TELLING)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
            LostProcessError,
        ),
        ("ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'", DistBackendError),
    ],
)
def test_a_transport_without_memory_is_no_lost_process(message: str, kind: type[Exception]) -> None:
    with pytest.raises(kind), telling_of_lost_processes():
        raise DistBackendError(message)
