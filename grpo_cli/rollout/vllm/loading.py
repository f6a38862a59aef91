"""New weights into a model that vLLM runs. Imports vLLM: for processes where vLLM runs only."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform

from grpo_cli.errors import TrainingError

_SHOWN_NAMES = 5
_REASON_CHARACTERS = 160
"""Some models list all of their parameters."""


class WeightLoading:
    """Replaces the weights of a loaded model, as often as one likes: `begin`, any number of `load`, `finish`.

    vLLM's layer-wise reload does the work: weights are brought into the form that the kernels want, in the memory where the
    old ones are. It leaves unanswered whether all weights came and whether each went anywhere, which is checked here.

    Every call must be made under `vllm.config.set_current_vllm_config`. Between `begin` and the end of `finish` the model must
    not run; after an error neither, until another round has succeeded.

    Args:
        model: What vLLM's model runner holds.
        model_config: vLLM's.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model: Any = model
        self._config = model_config
        self._begun = False
        self._wanted: set[str] = set()
        self._loaded: set[str] = set()
        self._calls = 0
        """Of the parameters' loaders."""

    def begin(self) -> None:
        """Prepare for weights, whatever an earlier round has left."""
        if self._begun:  # what was buffered then would be counted now
            self._put_back()
        names = {name for name, _ in self._model.named_parameters()}
        aliases = {name for name, _ in self._model.named_parameters(remove_duplicate=False)} - names
        initialize_layerwise_reload(self._model)
        self._begun = True
        # The parameters of the checkpoint's form, which a quantized model has only now; tied ones are two for the time being.
        parameters = dict(self._model.named_parameters())
        self._wanted = parameters.keys() - aliases
        self._loaded = set()
        for name, parameter in parameters.items():
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            parameter.weight_loader = self._counted(name, getattr(loader, "uncounted", loader))

    def load(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Load some weights. Their memory must stay as it is until `finish`: layers are buffered until they are complete.

        Args:
            named: Names and tensors as a checkpoint has them, a layer's best one after another.

        Raises:
            TrainingError: If a name is unknown to the model, or a shape is wrong.
        """
        offer = _Offer(named, lambda: self._calls)
        self._load_part(offer)
        if holds_a_part_only() or not offer.seem_unused():
            return
        for name, tensor in offer.unused:  # it is slow to load weights one by one, so only these are
            if not self._load_part(_Offer([(name, tensor)], lambda: self._calls)):
                raise TrainingError(
                    f"vLLM's {self._name} has no use for the weight {name}",
                    hint="vLLM and the trainer must have the same model",
                )

    def finish(self) -> None:
        """Put the new weights to use.

        Raises:
            TrainingError: If some are missing.
        """
        if self._config.quantization is None:  # otherwise vLLM's parameters are not those of a checkpoint
            missing = sorted(self._wanted - self._loaded) or self._incomplete()
            if missing:
                raise TrainingError(
                    f"vLLM's {self._name} got no weights for {_shown(missing)}",
                    hint="vLLM and the trainer must have the same model",
                )
        self._put_back()
        _renew_packed_copies(self._model)

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _counted(self, name: str, loader: Callable[..., Any]) -> Callable[..., Any]:
        """Count the calls of a parameter's loader; vLLM finds its own beneath."""

        @functools.wraps(loader)
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self._calls += 1
            self._loaded.add(name)
            return loader(*arguments, **keywords)

        counted.uncounted = loader  # type: ignore[attr-defined]
        return counted

    def _load_part(self, offer: "_Offer") -> set[str]:
        """Load weights and give the names of the parameters that they went to."""
        try:
            loaded: set[str] | None = self._model.load_weights(iter(offer))
        # Each family's loaders have errors of their own.
        except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = shorten(str(error) or type(error).__name__, _REASON_CHARACTERS, placeholder=" ...")
            raise TrainingError(
                f"vLLM's {self._name} cannot load {_shown(offer.current)}: {reason}",
                hint="vLLM and the trainer must have the same model",
            ) from error
        self._loaded |= loaded or set()
        return loaded or set()

    def _incomplete(self) -> list[str]:
        """Find layers made of several weights of which some did not come, such as keys but no values.

        Only linear layers and experts are looked at: vLLM pads others, so that they never become full.
        """
        return sorted(
            name
            for name, layer in self._model.named_modules()
            if (isinstance(layer, LinearBase) or _are_experts(layer))
            and (info := get_layerwise_info(layer)).can_load()
            and info.load_numel < info.load_numel_total
        )

    def _put_back(self) -> None:
        """End the reload, complete or not."""
        with _without_warnings("vllm.model_executor.model_loader.reload.layerwise"):
            finalize_layerwise_reload(self._model, self._config)
        self._begun = False


class _Offer:
    """Weights for a model's `load_weights`, which mostly loads each before it asks for the next.

    Args:
        named: Their names and tensors.
        num_calls: Counts the calls of all parameters' loaders so far.

    Attributes:
        unused: Those after which no loader was called before the next was asked for.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], num_calls: Callable[[], int]) -> None:
        self._named = named
        self._num_calls = num_calls
        self._calls_at_end: int | None = None
        self._offered = 0
        self.unused: list[tuple[str, Tensor]] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for item in self._named:
            before = self._num_calls()
            self._offered += 1
            yield item
            if self._num_calls() == before:
                self.unused.append(item)
        self._calls_at_end = self._num_calls()

    @property
    def current(self) -> list[str]:
        """The weight that is being loaded; all of them for a model that asks for all first."""
        names = [name for name, _ in self._named]
        return names if self._calls_at_end is not None else names[max(self._offered - 1, 0) : self._offered]

    def seem_unused(self) -> bool:
        """Tell whether more of them went unused than were loaded in the end."""
        loaded_late = 0 if self._calls_at_end is None else self._num_calls() - self._calls_at_end
        return len(self.unused) > loaded_late


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def holds_a_part_only() -> bool:
    """Tell whether weights that go nowhere here may be those of another process: other layers, or other experts."""
    parallel = get_current_vllm_config().parallel_config
    return bool(parallel.pipeline_parallel_size > 1 or parallel.enable_expert_parallel)


def _are_experts(layer: nn.Module) -> bool:
    """Tell whether a layer is experts whose number of values vLLM knows without what it pads them with."""
    weight = getattr(layer, "w13_weight", None)
    is_plain = isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)
    return is_plain and hasattr(weight, "weight_loader_numel")


def _renew_packed_copies(model: nn.Module) -> None:
    """Bring into the form of the CPU's kernels what the reload leaves out: the copy that a tied head has, and experts.

    Without it a head computes with the old embedding, and experts with their numbers out of place.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)
        elif isinstance(method, UnquantizedFusedMoEMethod) and "w13_weight" in dict(
            layer.named_parameters(recurse=False)
        ):
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)


@contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Silence a logger of vLLM: it warns of every tied head, and what it warns of is checked here."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
