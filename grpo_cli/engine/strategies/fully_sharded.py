"""PyTorch's fully sharded data parallelism (Zhao et al. 2023, in its second version): weights, gradients and optimizer states in parts."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.strategies.hooks import without_hooks
from grpo_cli.engine.strategies.replicas import saved_buffers
from grpo_cli.engine.strategies.spread import spread_of
from grpo_cli.engine.strategies.strategy import MASTER
from grpo_cli.errors import ModelError
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.layers import layers_of


class FullySharded:
    """Trains with torch's own `fully_shard`, which needs no other package.

    A layer is whole while it computes, and what is outside of the layers, embedding and head, while the model does. Accelerate's plugin is not used: without an accelerator it trains copies instead, and does not say so.

    Args:
        processes: The processes of this run.
        bf16: Whether float32 weights are rounded to bfloat16 when they are brought together. Under autocast alone, each process would
            keep such copies of all of them until the backward.
        offload: Whether weights, gradients and the optimizer's states are in main memory while they are not used.
    """

    in_step = True

    def __init__(self, processes: Processes, *, bf16: bool, offload: bool) -> None:
        has_own_memory = processes.device.type != "cpu"
        self.spread = spread_of("fsdp2", processes.count, offload_params=offload and has_own_memory)
        # The first process has the weights; the others only get their parts of them.
        self.loads_on = torch.device("cpu" if processes.is_main else "meta")
        self._processes = processes
        self._precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        self._offloads = offload
        self._optimizer: Optimizer | None = None
        self._trained: list[nn.Parameter] = []
        self._max_grad_norm = 0.0
        self._mesh = _mesh(processes)

    def building(self) -> AbstractContextManager[None]:
        """See `Strategy`."""
        return nullcontext()

    def prepare(self, policy: PolicyModel, optimizer: Optimizer, *, max_grad_norm: float) -> nn.Module:
        """See `Strategy`. All processes have the weights of the first."""
        self._optimizer, self._max_grad_norm = optimizer, max_grad_norm
        names = {parameter: name for name, parameter in policy.named_parameters()}
        kinds = {str(parameter.dtype) for group in optimizer.param_groups for parameter in group["params"]}
        if len(kinds) > 1:
            raise ModelError(
                f"distributed.strategy: fsdp2 trains weights of one precision, and {type(policy.model).__name__} has {', '.join(sorted(kinds))}",
                hint="set model.dtype to float32, or take deepspeed_zero3",
            )
        self._cut(policy)
        cut = dict(policy.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [cut[names[parameter]] for parameter in group["params"]]
        self._trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return self._processes.place(policy, moves=False)

    def prepare_frozen(self, policy: PolicyModel) -> nn.Module:
        """See `Strategy`."""
        self._cut(policy)
        return self._processes.place(policy, moves=False)

    def _cut(self, policy: PolicyModel) -> None:
        """Cut a model into parts, and give every process its part of the first one's weights.

        Args:
            policy: In the first process's main memory.

        Raises:
            ModelError: If torch cannot cut it.
        """
        kind = type(policy.model).__name__
        layers = layers_of(policy)
        if not layers:
            raise ModelError(
                f"distributed.strategy: fsdp2 cuts a model layer by layer, and {kind} is not made of transformers' layers",
                hint="take deepspeed_zero3",
            )
        weights = {name: parameter.detach() for name, parameter in policy.named_parameters()}
        settings: dict[str, Any] = {"mesh": self._mesh, "mp_policy": self._precision}
        if self._offloads:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        self._processes.gather(b"")  # here they wait for those that load from slower disks, with patience
        try:
            for layer in layers:
                fully_shard(layer, **settings)
            # Not whole between calls, though its backward begins at once: whoever reads the parameters finds parts.
            fully_shard(policy, **settings, reshard_after_forward=True)
        except (ValueError, NotImplementedError) as error:
            raise ModelError(
                f"distributed.strategy: fsdp2 cannot cut {kind}: {error}", hint="take deepspeed_zero3"
            ) from error
        for module in _cut_modules(policy):
            # The sum and not the mean, which gloo does not know either.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # A process may have no token for an expert that another one has tokens for.
            module.set_reduce_scatter_unused_params(True)
        self._scatter(policy, weights)
        # Torch does it in the first forward, before which `_take_apart` may be asked for.
        policy._get_fsdp_state()._lazy_init()  # type: ignore[operator]  # noqa: SLF001

    @torch.no_grad()
    def _scatter(self, policy: PolicyModel, weights: Mapping[str, Tensor]) -> None:
        """Give every process its part of the first one's weights, one after another, and all of its buffers."""
        device, is_main = self._processes.device, self._processes.is_main
        if not is_main:
            with _tied(policy):
                policy.to_empty(device="cpu" if self._offloads else device)
        for name in weights:
            parameter = policy.get_parameter(name)
            part = _part(parameter)
            whole = (
                weights[name].to(device) if is_main else torch.empty(parameter.shape, dtype=part.dtype, device=device)
            )
            part.copy_(distribute_tensor(whole, self._mesh, [Shard(0)]).to_local())
        for module in policy.modules():
            for name, buffer in module.named_buffers(recurse=False):
                moved = buffer.to(device).contiguous()  # as NCCL wants it
                torch.distributed.broadcast(moved, src=0, group=self._mesh.get_group())
                module.register_buffer(name, moved, persistent=name not in module._non_persistent_buffers_set)  # noqa: SLF001

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
        for module in _cut_modules(policy):
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
        return StreamedWeights(policy, self._processes.device)

    def optimizer_states(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """See `Strategy`."""
        assert self._optimizer is not None
        for number, state in self._optimizer.state_dict()["state"].items():
            yield number, {name: _whole(value, self._processes.device) for name, value in state.items()}

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
        cut = distribute_tensor(value.to(self._processes.device), self._mesh, parameter.placements, src_data_rank=None)
        return cut.to(parameter.device)


@dataclass(frozen=True, slots=True)
class StreamedWeights:
    """What a model's checkpoint would hold, but for what is tied, from weights that are cut into parts: one whole at a time.

    Attributes:
        policy: The live policy.
        device: Where they are brought together.
    """

    policy: PolicyModel
    device: torch.device

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        _take_apart(self.policy)
        for name, parameter in self.policy.model.named_parameters():
            yield name, _whole(parameter.detach(), self.device)
        yield from saved_buffers(self.policy.model)


def _mesh(processes: Processes) -> DeviceMesh:
    """Make the group of all processes that exchanges parts, on their devices and, where these offload, in main memory."""
    processes.form_group()
    kind = processes.device.type
    group = torch.distributed.new_group(backend="gloo" if kind == "cpu" else f"cpu:gloo,{kind}:nccl")
    return DeviceMesh.from_group(group, kind)


@contextmanager
def _tied(model: nn.Module) -> Iterator[None]:
    """Let parameters that are one stay one, whatever is done to each place that they have: a model on `meta` would lose that.

    Not by `tie_weights`, which does not find what adapters have a copy of.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    yield
    for (first, first_name), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))


def _cut_modules(policy: nn.Module) -> list[FSDPModule]:
    """List what has been cut, the policy itself first."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def _take_apart(policy: PolicyModel) -> None:
    """Let a process have its parts only, whatever was cut off in the middle."""
    assert isinstance(policy, FSDPModule)
    policy.reset_iter_state()


def _part(parameter: Tensor) -> Tensor:
    """Give what this process keeps of a parameter."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter


def _whole(value: Tensor, device: torch.device) -> Tensor:
    """Bring the parts of a tensor together, in every process and on its device."""
    if not isinstance(value, DTensor):
        return value
    whole: Tensor = DTensor.full_tensor(value.to(device))  # type: ignore[arg-type]
    return whole
