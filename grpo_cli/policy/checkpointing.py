"""Which activations the backward finds in memory, and which it computes again."""

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from grpo_cli.errors import ModelError

Checkpointing = Literal[True, False, "selective"]

_KEPT_OPERATIONS = (
    "mm",
    "addmm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
"""Matrix products with weights, and attention kernels: nearly all of a layer's arithmetic. Batched products are not among them:
they are attention scores, the largest activations of eager attention."""

_KEPT = frozenset(
    [getattr(torch.ops.aten, name).default for name in _KEPT_OPERATIONS if hasattr(torch.ops.aten, name)]
    + ([torch.ops.mkldnn._linear_pointwise.default] if torch._C._has_mkldnn else [])  # noqa: SLF001  no public names
)

_SUMS = frozenset(getattr(torch.ops.aten, name).default for name in ("view", "_unsafe_view")) | {
    torch.ops.aten.add.Tensor
}
"""Operations whose backward reads none of the numbers that they were given."""


def possible_checkpointing(model: Any, asked: Checkpointing, *, cut: bool) -> Checkpointing:
    """Give what comes nearest to what a recipe asks for.

    Args:
        model: A transformers model.
        asked: The recipe's `train.gradient_checkpointing`.
        cut: Whether weights are cut into parts. Then single operations cannot be kept: a layer's second run brings its weights together
            in other exchanges than its first, and PyTorch takes that for another computation.
    """
    if asked == "selective" and cut:
        return bool(getattr(model, "supports_gradient_checkpointing", False))
    return asked


def set_checkpointing(model: Any, checkpointing: Checkpointing) -> None:
    """Choose between memory and time in a model's backward.

    Args:
        model: A transformers model.
        checkpointing: False keeps every activation. True keeps the input of each layer and runs its forward again, a third more
            arithmetic (Chen et al. 2016). `selective` runs only what is cheap again (norms, activation functions, rotations,
            products of elements): on a Llama it needs 0.4 of the memory and some 3 % more time. A model whose layers cannot be
            checkpointed keeps everything.

    Raises:
        ModelError: If checkpointing is demanded and the model cannot do it.
    """
    if checkpointing is False:
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        if checkpointing is True:
            raise ModelError(
                f"train.gradient_checkpointing: {type(model).__name__} does not support it",
                hint="set it to selective or false, and lower train.micro_batch_tokens to save memory",
            )
        return
    # Nothing in the forward is random (see `load.disable_dropout`), so no generator has to be put back.
    arguments: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if checkpointing == "selective":
        arguments["context_fn"] = _KeptProducts().contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


class _KeptProducts:
    """Chooses what selective checkpointing keeps of each layer, by what the layers before it were like.

    The outcome of a layer's last product is as a rule only added to the layer's input, so the backward never reads it: a tenth of
    what would be kept of a Llama. Which product is the last cannot be known before the layer has run. So it is taken from the layer
    before, where that had as many products as the one before it. A wrong guess costs one product that is computed again.
    """

    def __init__(self) -> None:
        self._counts = (0, 0)  # products of the last two layers
        self._only_added = False  # whether the last one's last product was only added to something

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Give the contexts of one layer's forward and of its recomputation."""
        before, last = self._counts
        unread = last if self._only_added and before == last else 0
        self._counts = (last, 0)
        self._only_added = False
        recomputed = 0

        def policy(context: Any, operation: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
            nonlocal recomputed
            if operation not in _KEPT:
                self._only_added = self._only_added and (context.is_recompute or operation in _SUMS)
                return CheckpointPolicy.PREFER_RECOMPUTE
            if context.is_recompute:  # newer releases of torch remember the answers of the forward and do not ask again
                recomputed += 1
                number = recomputed
            else:
                number = self._counts[1] + 1
                self._counts = (last, number)
                self._only_added = True
            return CheckpointPolicy.PREFER_RECOMPUTE if number == unread else CheckpointPolicy.MUST_SAVE

        contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
        contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return contexts
