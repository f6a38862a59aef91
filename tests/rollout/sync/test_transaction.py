"""A transfer is all or nothing: a receiver samples only from weights that came completely."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from grpo_cli.errors import Interrupted, TrainingError
from grpo_cli.rollout.sync.buckets import Bucket, unpack
from grpo_cli.rollout.sync.checksum import Checksum
from grpo_cli.rollout.sync.transaction import transfer
from grpo_cli.types import PolicyVersion

VERSION = PolicyVersion(7)
WEIGHTS = [(f"layer.{number}", torch.full((8,), float(number))) for number in range(6)]
NUM_BUCKETS = 3


class Memory:
    """A receiver that keeps weights, and fails where it is told to: at each `failures` of the calls, counted from 0."""

    def __init__(self, failures: dict[int, BaseException] | None = None) -> None:
        self.failures = failures or {}
        self.calls: list[str] = []
        self.weights: dict[str, Tensor] = {}
        self.checksum = Checksum()
        self.paused = False
        self.version: int | None = None

    def _call(self, name: str) -> None:
        number = len(self.calls)
        self.calls.append(name)
        if number in self.failures:
            raise self.failures[number]

    def begin(self) -> None:
        self.paused = True
        self.checksum = Checksum()
        self._call("begin")

    def receive(self, bucket: Bucket) -> None:
        self._call("receive")
        self.checksum.add(bucket)
        self.weights.update((name, tensor.clone()) for name, tensor in unpack(bucket))

    def finish(self, version: PolicyVersion, checksum: str) -> None:
        self._call("finish")
        assert checksum == self.checksum.value
        self.version = version
        self.paused = False

    def abandon(self) -> None:
        self.calls.append("abandon")


def run(receiver: Memory, weights: object = WEIGHTS) -> int:
    assert isinstance(weights, list | Iterator)
    report = transfer(receiver, weights, VERSION, bucket_bytes=64, dtype=torch.float32)
    assert report.version == VERSION
    return report.bytes


def complete(receiver: Memory) -> bool:
    return receiver.weights.keys() == dict(WEIGHTS).keys() and all(
        torch.equal(receiver.weights[name], tensor) for name, tensor in WEIGHTS
    )


def test_all_weights_arrive_and_then_it_samples_again() -> None:
    receiver = Memory()
    assert run(receiver) == sum(tensor.nbytes for _, tensor in WEIGHTS)
    assert receiver.calls == ["begin", *["receive"] * NUM_BUCKETS, "finish"]
    assert complete(receiver)
    assert (receiver.version, receiver.paused) == (VERSION, False)


@pytest.mark.parametrize("call", range(NUM_BUCKETS + 2))
def test_after_a_failure_everything_is_sent_again(call: int) -> None:
    receiver = Memory({call: TrainingError("the wire broke")})
    assert run(receiver) == sum(tensor.nbytes for _, tensor in WEIGHTS)
    whole = ["begin", *["receive"] * NUM_BUCKETS, "finish"]
    assert receiver.calls == [*whole[: call + 1], "abandon", *whole]
    assert complete(receiver)
    assert (receiver.version, receiver.paused) == (VERSION, False)


def test_after_two_failures_it_stays_paused_and_both_are_told() -> None:
    receiver = Memory({2: TrainingError("the wire broke"), 6: TrainingError("the server is gone", hint="start it")})
    with pytest.raises(TrainingError) as caught:
        run(receiver)
    assert "weights of step 7: the server is gone (before that: the wire broke)" in caught.value.message
    assert caught.value.hint == "start it"
    assert (receiver.calls.count("abandon"), receiver.calls[-1]) == (2, "abandon")
    assert (receiver.version, receiver.paused) == (None, True)


def test_the_same_failure_twice_is_told_once() -> None:
    receiver = Memory({0: TrainingError("no such name"), 2: TrainingError("no such name")})
    with pytest.raises(TrainingError) as caught:
        run(receiver)
    assert caught.value.message.count("no such name") == 1


def test_a_request_to_stop_is_not_taken_for_a_failure() -> None:
    """It must go up at once; whoever comes next begins anew."""
    receiver = Memory({2: Interrupted(2)})
    with pytest.raises(Interrupted):
        run(receiver)
    assert receiver.calls == ["begin", "receive", "receive"]
    assert receiver.paused


def test_a_mistake_of_ours_is_not_repeated() -> None:
    receiver = Memory({2: KeyError("oops")})
    with pytest.raises(KeyError):
        run(receiver)
    assert receiver.calls == ["begin", "receive", "receive", "abandon"]
    assert receiver.paused


def test_weights_that_can_be_sent_only_once_are_refused() -> None:
    with pytest.raises(AssertionError, match="sent again"):
        run(Memory(), iter(WEIGHTS))
