"""New weights and new adapters into a model that vLLM runs. Imports vLLM: for processes where vLLM runs only."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.sync.adapters import told_apart
from grpo_cli.rollout.vllm.limits import ADAPTER_NAME
from grpo_cli.rollout.vllm.loading import WeightLoading

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

    def begin(self) -> None:
        """Prepare for an update, whatever an earlier one has left."""
        self._takes_weights, self._adapters = False, {}

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
        if adapters:
            self._check_places(name.rpartition(".")[0] for name, _ in adapters)
        # Their memory is not theirs for long.
        self._adapters |= {name: tensor.detach().clone() for name, tensor in adapters}

    def finish(self) -> None:
        """Put the model's own weights to use.

        Raises:
            TrainingError: If some are missing, or adapters came without what they belong on.
        """
        if self._takes_weights:
            self._weights.finish()
            self._takes_weights, self._has_weights = False, True
        if not self._has_weights:
            raise TrainingError("adapters came before the weights that they belong on")

    def activate(self) -> None:
        """Put the adapters of the last update to use, if it had some; vLLM forgets them at the end of an update."""
        if not self._adapters:
            return
        manager, adapters = self._model.lora_manager, self._adapters
        rank = next(len(tensor) for name, tensor in adapters.items() if name.endswith(".lora_A"))
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
        manager.remove_adapter(_NUMBER)
        manager.add_adapter(lora)
        manager.activate_adapter(_NUMBER)

    def _check_places(self, layers: Any) -> None:
        """Check that vLLM puts adapters on these layers; others it would leave out without a word."""
        manager = getattr(self._model, "lora_manager", None)
        if manager is None:
            raise TrainingError(
                "vLLM runs without adapters", hint="start it with the recipe, or set vllm.merge_adapters"
            )
        packed = manager.packed_modules_mapping
        known = {part for name in manager.supported_lora_modules for part in packed.get(name, [name])}
        unknown = sorted({layer for layer in layers if layer.rpartition(".")[2] not in known})
        if unknown:
            raise TrainingError(
                f"vLLM's {type(self._model).__name__} takes no adapters on {unknown[0]}; allowed: {', '.join(sorted(known))}",
                hint="set vllm.merge_adapters, or leave such layers out of model.lora.target_modules",
            )
