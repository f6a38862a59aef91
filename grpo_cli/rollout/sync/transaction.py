"""New weights for a receiver, all or none: it samples from them only when every tensor has come as it was sent."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.sync.buckets import Bucket, pack
from grpo_cli.rollout.sync.checksum import Checksum
from grpo_cli.types import PolicyVersion, SyncReport


class WeightReceiver(Protocol):
    """What takes the weights: an engine in this process, or one or more servers."""

    def begin(self) -> None:
        """Stop sampling and prepare for weights, whatever an earlier attempt has left; connect if there is no connection.

        Raises:
            TrainingError: If it cannot.
        """
        ...

    def receive(self, bucket: Bucket) -> None:
        """Take some of them; the bucket is dropped afterwards.

        Raises:
            TrainingError: If it cannot.
        """
        ...

    def finish(self, version: PolicyVersion, checksum: str) -> None:
        """Check that all came and that `checksum` is theirs, forget what was cached under the old ones, and sample again.

        Raises:
            TrainingError: If it has something else; it stays paused.
        """
        ...

    def abandon(self) -> None:
        """Give up an attempt and stay paused: what is there is neither the old weights nor the new. Raises nothing."""
        ...


def transfer(
    receiver: WeightReceiver,
    named_weights: Iterable[tuple[str, Tensor]],
    version: PolicyVersion,
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None,
) -> SyncReport:
    """Send all weights; if that fails, once more from the beginning.

    A repetition overwrites every tensor, so nothing is applied twice. A failed receiver stays paused until a later transfer
    succeeds. Anything but a `TrainingError` is no failure of the receiver and is not repeated.

    Args:
        receiver: What gets them.
        named_weights: Names and tensors as a checkpoint has them; can be iterated again.
        version: Their version.
        bucket_bytes: Bytes that travel, and are held besides the weights, at once.
        dtype: What floating-point weights are sent as, see `pack`; None for their own.

    Returns:
        The bytes of the attempt that succeeded.

    Raises:
        TrainingError: If the second attempt fails as well.
    """
    assert iter(named_weights) is not named_weights, "an iterator cannot be sent again"
    try:
        sent = _attempt(receiver, named_weights, version, bucket_bytes, dtype)
    except TrainingError as first:
        try:
            sent = _attempt(receiver, named_weights, version, bucket_bytes, dtype)
        except TrainingError as second:
            earlier = "" if first.message == second.message else f" (before that: {first.message})"
            raise TrainingError(
                f"the rollout engine did not take the weights of step {version}: {second.message}{earlier}",
                hint=second.hint or first.hint,
            ) from second
    return SyncReport(version=version, bytes=sent)


def _attempt(
    receiver: WeightReceiver,
    named_weights: Iterable[tuple[str, Tensor]],
    version: PolicyVersion,
    bucket_bytes: int,
    dtype: torch.dtype | None,
) -> int:
    """Send all weights once and give their bytes."""
    checksum, sent = Checksum(), 0
    try:
        receiver.begin()
        for bucket in pack(named_weights, bucket_bytes=bucket_bytes, dtype=dtype):
            checksum.add(bucket)
            receiver.receive(bucket)
            sent += bucket.num_bytes
            del bucket  # before the next one is made
        receiver.finish(version, checksum.value)
    except Exception:
        receiver.abandon()
        raise
    return sent
