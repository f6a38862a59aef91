"""New weights from the trainer, inside vLLM's processes: the backend `grpo` of vLLM's weight-transfer routes.

Imports vLLM, which loads it in all of its processes as a plugin (entry point group `vllm.general_plugins`), and once more
through `worker_extension`.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.sync.buckets import unpack
from grpo_cli.rollout.sync.checksum import Checksum
from grpo_cli.rollout.sync.transports import BucketSource, build_source

BACKEND = "grpo"
"""What `--weight-transfer-config` calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedWeights:
    """What an update brought to this process.

    Attributes:
        checksum: As the trainer computes it of what it sends.
        tensors: Their number.
        bytes: Of the buckets.
    """

    checksum: str
    tensors: int
    bytes: int


class BucketTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Takes buckets from any transport and loads them, one update of vLLM's for each bucket.

    vLLM calls it in each process that holds weights, under its configuration; what it raises is the answer to the request.

    Attributes:
        received: Of the newest complete update; None before the first, and from the start of one until its end.
    """

    # Both are JSON objects whose keys are the transport's affair.
    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # Processes that only register the backend have no use for vLLM's layers, which take a second to import.
        from grpo_cli.rollout.vllm.adapter_loading import UpdateLoading  # noqa: PLC0415

        self._source: BucketSource | None = None
        self._loading = UpdateLoading(self.model, self.model_config)
        self._checksum = Checksum()
        self._tensors = self._bytes = 0
        self.received: ReceivedWeights | None = None

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect to a trainer, in place of any earlier one.

        Args:
            init_info: From `WeightTransport.init_info`.
        """
        self.shutdown()
        parallel = self.parallel_config
        # Not data_parallel_rank, which is 0 everywhere if the model has no experts.
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        with _launch_environment(self.device):
            self._source = build_source(init_info, rank=rank, device=self.device)

    def start_weight_update(self) -> None:
        """Prepare for weights, whatever came before."""
        self.received = None
        self._checksum, self._tensors, self._bytes = Checksum(), 0, 0
        self._loading.begin()

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Take a bucket.

        Args:
            update_info: From `WeightTransport.send`; or `{"abandon": true}` to end an update without its end: vLLM has no route
                for it, but an update that fails is over.

        Raises:
            TrainingError: If a weight does not fit, no trainer is connected, or the update is to be abandoned.
        """
        if update_info.get("abandon"):
            raise TrainingError("the trainer abandoned this update of the weights")
        if self._source is None:
            raise TrainingError("no trainer is connected: init_weight_transfer_engine comes first")
        bucket = self._source.receive(update_info)
        self._checksum.add(bucket)
        self._loading.load(unpack(bucket))
        self._tensors += len(bucket.slots)
        self._bytes += bucket.num_bytes

    def finish_weight_update(self) -> None:
        """Put the weights to use.

        Raises:
            TrainingError: If some are missing. The update goes on for vLLM, until it is abandoned.
        """
        self._loading.finish()
        self.received = ReceivedWeights(checksum=self._checksum.value, tensors=self._tensors, bytes=self._bytes)

    def activate_adapters(self) -> None:
        """Put the adapters of the newest update to use, if it had some."""
        self._loading.activate()

    def shutdown(self) -> None:
        """Let the trainer go."""
        if self._source is not None:
            self._source.close()
            self._source = None


def register() -> None:
    """Make the backend known to vLLM in this process; vLLM calls it as a plugin, in some processes more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001  there is no other way to ask
        WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)


def _launch_environment(device: torch.device) -> AbstractContextManager[None]:
    """Connect as the trainer does: vLLM sets variables of NCCL for itself, and peers whose variables differ wait for ever."""
    if device.type != "cuda":
        return nullcontext()
    try:
        from vllm.utils.nccl import unpinned_nccl_env  # noqa: PLC0415
    except ImportError:  # older versions set none
        return nullcontext()
    environment: AbstractContextManager[None] = unpinned_nccl_env()
    return environment
