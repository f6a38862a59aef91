"""PyTorch's fully sharded data parallelism (Zhao et al. 2023, in its second version): weights, gradients and optimizer states in parts."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.strategies.hooks import without_hooks
from grpo_cli.engine.strategies.replicas import saved_buffers
from grpo_cli.engine.strategies.strategy import MASTER
from grpo_cli.policy.forward import PolicyModel

LOADING = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
"""What tells transformers that only the first process of a machine needs a model's weights; the others have zeros that take no memory."""


class FullySharded:
    """Trains with torch's own `fully_shard`, which needs no other package.

    A decoder layer is whole while it computes; what is outside of the layers, embedding and head, is whole for a forward and backward.

    Args:
        processes: The processes of this run.
        bf16: Whether to compute in bfloat16 what has float32 weights.
        offload: Whether weights, gradients and the optimizer's states are in main memory while they are not used.
    """

    name = "fsdp2"
    in_step = True
    optimizes_copies = False

    def __init__(self, processes: Processes, *, bf16: bool, offload: bool) -> None:
        self.weight_parts = self.gradient_parts = self.optimizer_parts = processes.count
        self.loads_on = torch.device("cpu")
        self._processes = processes
        self._bf16 = bf16
        self._offloads = offload and processes.device.type != "cpu"
        self._optimizer: Optimizer | None = None
        self._trained: list[nn.Parameter] = []
        self._max_grad_norm = 0.0
        processes.form_group()
        self._mesh: DeviceMesh = init_device_mesh(processes.device.type, (processes.count,))

    def building(self) -> AbstractContextManager[None]:
        """See `Strategy`. The first process of each machine loads a model into main memory, the others make room for it only."""
        return _loading_once() if self._processes.count > 1 else nullcontext()

    def prepare(self, policy: PolicyModel, optimizer: Optimizer, *, max_grad_norm: float) -> nn.Module:
        """See `Strategy`. All processes have the weights of the first."""
        self._optimizer, self._max_grad_norm = optimizer, max_grad_norm
        names = {parameter: name for name, parameter in policy.named_parameters()}
        self._cut(policy, keep_root=True)
        cut = dict(policy.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [cut[names[parameter]] for parameter in group["params"]]
        self._trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return policy

    def prepare_frozen(self, policy: PolicyModel) -> nn.Module:
        """See `Strategy`."""
        self._cut(policy, keep_root=False)
        return policy

    def _cut(self, policy: PolicyModel, *, keep_root: bool) -> None:
        """Cut a model into parts, and give every process its part of the first one's weights.

        Args:
            policy: In main memory.
            keep_root: Whether what is outside of the layers stays whole between a forward and its backward.
        """
        weights = {name: parameter.detach() for name, parameter in policy.named_parameters()}
        kind = next(policy.parameters()).dtype
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self._bf16 and kind == torch.float32 else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self._offloads else OffloadPolicy()
        decoder = policy.model.get_decoder() if hasattr(policy.model, "get_decoder") else policy.model
        for layer in getattr(decoder, "layers", ()):
            fully_shard(layer, mesh=self._mesh, mp_policy=precision, offload_policy=offload)
        fully_shard(
            policy, mesh=self._mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=not keep_root
        )
        for module in _sharded_modules(policy):
            # The sum and not the mean, which gloo does not know either.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # A process may have no token for an expert that another one has tokens for.
            module.set_reduce_scatter_unused_params(True)
        self._scatter(policy, weights)

    @torch.no_grad()
    def _scatter(self, policy: PolicyModel, weights: Mapping[str, Tensor]) -> None:
        """Give every process its part of the first one's weights, one after another."""
        for name, parameter in policy.named_parameters():
            part = _part(parameter)
            whole = weights[name].to(self._processes.device)
            part.copy_(distribute_tensor(whole, self._mesh, [Shard(0)]).to_local())
        for _, buffer in saved_buffers(policy.model):
            torch.distributed.broadcast(buffer, src=0)

    def backward(self, loss: Tensor) -> None:
        """See `Strategy`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def sum_gradients(self) -> None:
        """See `Strategy`: `backward` does it."""

    def apply(self) -> float:
        """See `Strategy`."""
        assert self._optimizer is not None
        total = nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm or math.inf)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def whole(self, policy: PolicyModel) -> AbstractContextManager[None]:
        """See `Strategy`. It takes the memory of all weights, in every process."""
        return self._gathered(policy)

    @contextmanager
    def _gathered(self, policy: PolicyModel) -> Iterator[None]:
        for module in _sharded_modules(policy):
            module.unshard()
        try:
            with without_hooks(policy):  # they would take a layer apart after its first call
                yield
        finally:
            _take_apart(policy)

    def own_parts(self, policy: PolicyModel) -> Iterator[Tensor]:
        """See `Strategy`."""
        _take_apart(policy)
        for parameter in policy.parameters():
            yield _part(parameter)

    def named_weights(self, policy: PolicyModel) -> Iterable[tuple[str, Tensor]]:
        """See `Strategy`."""
        return StreamedWeights(policy)

    def optimizer_states(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """See `Strategy`."""
        assert self._optimizer is not None
        for number, state in self._optimizer.state_dict()["state"].items():
            yield number, {name: _whole(value) for name, value in state.items()}

    def load_optimizer_states(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """See `Strategy`."""
        assert self._optimizer is not None
        cut = {
            number: {
                name: self._part_of(value, self._trained[number]) for name, value in state.items() if name != MASTER
            }
            for number, state in states.items()
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": cut, "param_groups": groups})

    def _part_of(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        """Cut a state as its parameter is cut; all processes have all of it, so nothing is exchanged."""
        if value.shape != parameter.shape or not isinstance(parameter, DTensor):  # the number of steps
            return value
        value = value.to(parameter.device)
        return distribute_tensor(value, self._mesh, parameter.placements, src_data_rank=None)


@dataclass(frozen=True, slots=True)
class StreamedWeights:
    """What a model's checkpoint would hold, but for what is tied, from weights that are cut into parts: one whole at a time.

    Attributes:
        policy: The live policy.
    """

    policy: PolicyModel

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        _take_apart(self.policy)
        for name, parameter in self.policy.model.named_parameters():
            yield name, _whole(parameter.detach())
        yield from saved_buffers(self.policy.model)


@contextmanager
def _loading_once() -> Iterator[None]:
    """Tell transformers about `LOADING`, in the only way there is."""
    before = {name: os.environ.get(name) for name in LOADING}
    os.environ.update(LOADING)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _sharded_modules(policy: nn.Module) -> list[FSDPModule]:
    """List what has been cut, the policy itself first."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def _take_apart(policy: nn.Module) -> None:
    """Let a process have its parts only; what is outside of the layers is whole after a forward that has no backward."""
    for module in _sharded_modules(policy):
        module.reshard()


def _part(parameter: Tensor) -> Tensor:
    """Give what this process keeps of a parameter."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter


def _whole(value: Tensor) -> Tensor:
    """Bring the parts of a tensor together, in every process."""
    return value.full_tensor() if isinstance(value, DTensor) else value
