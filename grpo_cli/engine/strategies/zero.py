"""DeepSpeed's ZeRO (Rajbhandari et al. 2020): optimizer states (1), gradients (2) and weights (3) are cut into a part for each process."""

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.strategies.hooks import without_hooks
from grpo_cli.engine.strategies.replicas import NamedWeights, saved_buffers
from grpo_cli.engine.strategies.spread import spread_of_zero
from grpo_cli.engine.strategies.strategy import MASTER
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.sharding import whole_bytes, whole_shape

BUCKET_BYTES = 64 << 20
"""Weights that are brought together at once, which takes the room for them twice."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


class Zero:
    """Trains with DeepSpeed.

    Args:
        processes: The processes of this run.
        stage: 1, 2 or 3.
        settings: DeepSpeed's configuration, without what `prepare` is told.
    """

    in_step = True

    def __init__(self, processes: Processes, *, stage: int, settings: Mapping[str, Any]) -> None:
        self.spread = spread_of_zero(
            f"deepspeed_zero{stage}",
            processes.count,
            settings["zero_optimization"],
            has_own_memory=processes.device.type != "cpu",
        )
        self.loads_on = processes.device
        self._processes = processes
        self._stage = stage
        self._settings = dict(settings)
        self._engine: Any = None
        self._trained: list[nn.Parameter] = []
        self._deepspeed = _deepspeed()
        processes.form_group()
        self._deepspeed.init_distributed()

    def building(self) -> AbstractContextManager[None]:
        """See `Strategy`. With stage 3 a model is cut while it is loaded, so that no process ever holds all of it."""
        return self._cutting() if self._stage == 3 else nullcontext()

    @contextmanager
    def _cutting(self) -> Iterator[None]:
        from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config  # noqa: PLC0415

        announced = HfDeepSpeedConfig(self._settings)  # transformers sees it as long as somebody holds it
        try:
            yield
        finally:
            unset_hf_deepspeed_config()
            del announced

    def prepare(self, policy: PolicyModel, optimizer: Optimizer, *, max_grad_norm: float) -> nn.Module:
        """See `Strategy`. DeepSpeed gives all processes the weights of the first."""
        self._trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        settings = {**self._settings, "gradient_clipping": max_grad_norm}
        self._engine, *_ = self._deepspeed.initialize(model=policy, optimizer=optimizer, config=settings)
        prepared: nn.Module = self._engine
        return prepared

    def prepare_frozen(self, policy: PolicyModel) -> nn.Module:
        """See `Strategy`."""
        if self._stage < 3:
            rounds = self._settings["bf16"]["enabled"]
            return self._processes.place(policy.bfloat16() if rounds else policy)
        # Without an optimizer DeepSpeed only brings the weights together where they are used.
        zero = dict(self._settings["zero_optimization"])
        zero.pop("offload_optimizer", None)
        # Small parameters, too, so that `own_parts` is all there is to change.
        zero["stage3_param_persistence_threshold"] = 0
        prepared: nn.Module
        prepared, *_ = self._deepspeed.initialize(model=policy, config={**self._settings, "zero_optimization": zero})
        return prepared

    def backward(self, loss: Tensor) -> None:
        """See `Strategy`. DeepSpeed takes the mean over the processes."""
        self._engine.backward(loss * self._processes.count)

    def sum_gradients(self) -> None:
        """See `Strategy`: `backward` or `apply` does it."""

    def apply(self) -> float:
        """See `Strategy`. A gradient that is not finite is thrown away by DeepSpeed."""
        self._engine.step()
        if self._engine.optimizer.overflow:
            return math.nan
        return float(self._engine.get_global_grad_norm())

    def whole(self, policy: PolicyModel) -> AbstractContextManager[None]:
        """See `Strategy`. It takes the memory of all weights, in every process."""
        if self._stage < 3:
            return nullcontext()
        return self._gathered(policy)

    @contextmanager
    def _gathered(self, policy: PolicyModel) -> Iterator[None]:
        with ExitStack() as stack:
            # One after another: what comes together at once is there twice while it comes.
            for bucket in _buckets(policy.named_parameters()):
                stack.enter_context(self._deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]))
            # The hooks would take the weights of each module apart after its first call, all the same.
            stack.enter_context(without_hooks(policy))
            yield

    def own_parts(self, policy: PolicyModel) -> Iterator[Tensor]:
        """See `Strategy`."""
        for parameter in policy.parameters():
            part: Tensor = getattr(parameter, "ds_tensor", parameter)
            yield part

    def named_weights(self, policy: PolicyModel) -> Iterable[tuple[str, Tensor]]:
        """See `Strategy`."""
        if self._stage < 3:
            return NamedWeights(policy.model)
        return GatheredWeights(policy.model, self._deepspeed.zero.GatheredParameters)

    def optimizer_states(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """See `Strategy`. Where weights are rounded, what they are rounded from is among the states."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: PLC0415

        steps = [state["step"] for state in self._engine.optimizer.optimizer.state.values()]
        if not steps:  # nothing has been trained yet
            return
        self._link_states()
        for number, parameter in enumerate(self._trained):
            states = {name: safe_get_full_optimizer_state(parameter, name) for name in _MOMENTS}
            states = {name: state.view(whole_shape(parameter)) for name, state in states.items()}
            if parameter.dtype != torch.float32:
                states[MASTER] = safe_get_full_fp32_param(parameter).view(whole_shape(parameter))
            yield number, {"step": steps[0].clone(), **states}

    def load_optimizer_states(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """See `Strategy`."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state  # noqa: PLC0415

        if not states:
            return
        step = next(iter(states.values()))["step"]
        self._make_room(step)
        for number, state in states.items():
            parameter = self._trained[number]
            for name in _MOMENTS:
                safe_set_full_optimizer_state(parameter, state[name].to(self._processes.device), name)
            if MASTER in state and parameter.dtype != torch.float32:
                safe_set_full_fp32_param(parameter, state[MASTER].to(self._processes.device))

    def _make_room(self, step: Tensor) -> None:
        """Give the optimizer the states that it makes in its first step."""
        sharded = self._engine.optimizer
        parts = sharded.fp32_partitioned_groups_flat if self._stage == 3 else sharded.single_partition_of_fp32_groups
        for part in parts:
            moments = {name: torch.zeros_like(part) for name in _MOMENTS}
            sharded.optimizer.state[part] = {"step": step.clone().to(part.device), **moments}
        self._link_states()

    def _link_states(self) -> None:
        """Let DeepSpeed find the states of a parameter: it looks once, when only its first group of parameters has some."""
        if self._stage < 3:
            self._engine.optimizer._hp_optimizer_states_linked = False  # noqa: SLF001  there is no public way
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class GatheredWeights:
    """What a model's checkpoint would hold, but for what is tied, from weights that are cut into parts: some of them whole at a time.

    Attributes:
        model: The live model.
        gathered: Makes the context in which parameters are whole.
    """

    model: nn.Module
    gathered: Any

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in _buckets(self.model.named_parameters()):
            with self.gathered([parameter for _, parameter in bucket]):
                whole = [(name, parameter.detach()) for name, parameter in bucket]
            # Taking the parameters apart again leaves these tensors alone.
            yield from whole
        yield from saved_buffers(self.model)


def check_zero_settings(zero: Mapping[str, Any]) -> None:
    """Check what DeepSpeed can check without a model.

    Raises:
        ValueError: If it does not know a key, or a value is not possible.
    """
    _deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: PLC0415

    DeepSpeedZeroConfig(**zero)


def _buckets(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Put neighbouring parameters together."""
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in named:
        nbytes = whole_bytes(parameter)
        if bucket and size + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += nbytes
    if bucket:
        yield bucket


def _deepspeed() -> Any:
    """Import DeepSpeed, and keep its words to itself."""
    import deepspeed  # noqa: PLC0415  it takes seconds to import, and most runs do without
    import deepspeed.ops  # noqa: PLC0415

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls some exchanges by the names that they had before.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.")
    if not torch.accelerator.is_available():
        # Only its inference uses this one, and building it takes a compiler and a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
