"""Which activations the backward finds in memory, and which it computes again."""

from functools import partial
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
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def _keep_products(_context: Any, operation: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
    """Tell what selective checkpointing does with the outcome of an operation."""
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
