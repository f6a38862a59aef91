"""New weights and new adapters into a model that vLLM runs. Imports vLLM: for processes where vLLM runs only."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.sync.adapters import told_apart
from grpo_cli.rollout.vllm.limits import ADAPTER_NAME
from grpo_cli.rollout.vllm.loading import WeightLoading, holds_a_part_only

_NUMBER = 1
"""Of the adapter: there is one."""


def adapter_request() -> LoRARequest:
    """Make what a request for completions by the adapter carries. It was not loaded from a file, and is never looked for in one."""
    return LoRARequest(lora_name=ADAPTER_NAME, lora_int_id=_NUMBER, lora_path="/nowhere")


class UpdateLoading:
    """Takes updates of weights, of adapters, or of both: `begin`, any number of `load`, `finish`, and for adapters `activate`.

    See `WeightLoading`, which takes the model's own weights.

    Args:
        model: What vLLM's model runner holds.
        model_config: vLLM's.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model: Any = model
        self._weights = WeightLoading(model, model_config)
        self._takes_weights = False
        self._has_weights = False
        self._adapters: dict[str, Tensor] = {}
        self._ready: Any = None

    def begin(self) -> None:
        """Prepare for an update, whatever an earlier one has left."""
        self._takes_weights, self._adapters, self._ready = False, {}, None

    def load(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Take some weights and adapters. See `WeightLoading.load`.

        Raises:
            TrainingError: If they do not fit the model.
        """
        own, adapters = told_apart(named)
        if own:
            if not self._takes_weights:
                self._takes_weights, self._has_weights = True, False
                self._weights.begin()
            self._weights.load(own)
        if adapters and not hasattr(self._model, "lora_manager"):
            raise TrainingError("vLLM was started without room for adapters", hint="set vllm.merge_adapters")
        # Copies, for the memory that they come in is not theirs for long.
        self._adapters |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in adapters}

    def finish(self) -> None:
        """Put the model's own weights to use, and prepare the adapters.

        Raises:
            TrainingError: If some are missing, adapters came without what they belong on, or vLLM has no place for one of them.
        """
        if self._takes_weights:
            self._weights.finish()
            self._takes_weights, self._has_weights = False, True
        if not self._has_weights:
            raise TrainingError("adapters came before the weights that they belong on")
        self._ready = self._prepared() if self._adapters else None
        self._adapters = {}

    def activate(self) -> None:
        """Put the adapters of the last update to use, if it had some; vLLM forgets them at the end of an update."""
        if self._ready is None:
            return
        manager = self._model.lora_manager
        # All: what vLLM remembers of their places is forgotten with them only then.
        manager.remove_all_adapters()
        manager.add_adapter(self._ready)
        manager.activate_adapter(self._ready.id)
        self._ready = None

    def _prepared(self) -> Any:
        """Make vLLM's form of the adapters."""
        manager, adapters = self._model.lora_manager, self._adapters
        rank = next(len(tensor) for name, tensor in adapters.items() if name.endswith(".lora_A"))
        room = manager.lora_config.max_lora_rank
        if rank > room:
            raise TrainingError(f"the adapters have rank {rank}; vLLM was started for up to {room} (max_lora_rank)")
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            _NUMBER,
            {f"base_model.model.{name}.weight": tensor for name, tensor in adapters.items()},
            # The scale is in the weights already.
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        if not holds_a_part_only():
            self._check_places(lora.loras)
        return lora

    def _check_places(self, layers: Iterable[str]) -> None:
        """Check that vLLM puts adapters on these layers; others it would leave out without a word."""
        manager = self._model.lora_manager
        parts = {part for names in manager.packed_modules.values() for part in names}
        unknown = sorted(set(layers) - manager.modules.keys() - parts)
        if unknown:
            raise TrainingError(
                f"vLLM's {type(self._model).__name__} puts no adapters on {unknown[0]}",
                hint="set vllm.merge_adapters, or leave such layers out of model.lora.target_modules",
            )
