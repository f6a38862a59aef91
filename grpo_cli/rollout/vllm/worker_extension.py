"""What vLLM's workers can do besides their own: the class for `--worker-extension-cls`.

To import it makes the weight-transfer backend known, in every worker, even where plugins are switched off.
"""

from typing import Any

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.vllm.weight_transfer import BucketTransferEngine, register

register()


class WorkerExtension:
    """Becomes a base class of vLLM's worker."""

    weight_transfer_engine: BucketTransferEngine | None

    def grpo_weights(self) -> dict[str, Any]:
        """Say which weights this worker received last: their checksum, number of tensors and bytes, or None for each.

        They are None before the first update, and while one is under way.
        """
        engine = self.weight_transfer_engine
        received = None if engine is None else engine.received
        if received is None:
            return {"checksum": None, "tensors": None, "bytes": None}
        return {"checksum": received.checksum, "tensors": received.tensors, "bytes": received.bytes}

    def grpo_activate_adapters(self) -> None:
        """Put the adapters of the newest update to use, after vLLM has forgotten the ones before."""
        engine = self.weight_transfer_engine
        assert engine is not None
        engine.activate_adapters()

    def grpo_check(self, checksum: str) -> None:
        """Compare the weights that this worker received last with another worker's.

        Args:
            checksum: Of the other's.

        Raises:
            TrainingError: If they differ, or nothing was received.
        """
        own = self.grpo_weights()["checksum"]
        if own != checksum:
            raise TrainingError(f"a worker has weights with checksum {own} instead of {checksum}")
