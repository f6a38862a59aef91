"""Memory of attention with masks: each completion has a copy of its prompt's keys and values, in all heads.

Besides these, as long as a backward needs them: the row's own keys and values in all heads, and queries and outcomes of completions in
rectangles. Two more keys and values for each token cover that: 8 to 15 % more than tiny Llamas with 2 query heads to a key head hold.
"""

import torch

from grpo_cli.engine.activations import LayerSizes, Precision
from grpo_cli.flash import computes, has_kernel
from grpo_cli.policy.checkpointing import Checkpointing
from grpo_cli.policy.forward import PolicyModel, has_windows


def copied_bytes(
    policy: PolicyModel,
    tokens: int,
    *,
    read_keys: int,
    longest: int | None,
    device: torch.device,
    checkpointing: Checkpointing,
    precision: Precision,
) -> int:
    """Count what these copies and their gradients take during a backward.

    Args:
        policy: The policy; its model's configuration is read.
        tokens: Of a micro-batch.
        read_keys: Their keys, each counted once for every completion that reads it; 0: prompts are not shared.
        longest: Tokens of the longest sequence there will be; None: not known.
        device: Where it computes.
        checkpointing: What the model really does: without it, all layers keep theirs.
        precision: What it computes in.

    Returns:
        Bytes; 0 where the policy attends block by block, or the configuration does not say.
    """
    config = policy.model.config.get_text_config()
    layer = LayerSizes.of(config)
    if layer is None or not read_keys or _in_blocks(policy, layer, longest, device, precision):
        return 0
    size = 4 if precision == "float32" else 2
    keys_and_values = 2 * size * layer.query * (read_keys + 2 * tokens)
    kept = keys_and_values * (layer.layers if checkpointing is False else 1)
    return kept + keys_and_values  # and their gradients in one layer


def _in_blocks(
    policy: PolicyModel, layer: LayerSizes, longest: int | None, device: torch.device, precision: Precision
) -> bool:
    """Tell whether a packed row needs no masks (see `shared_prefix`)."""
    config = policy.model.config.get_text_config()
    bounded = getattr(config, "attn_logit_softcapping", None) is not None
    if not policy.attends_in_blocks or bounded or has_windows(config, longest):
        return False
    if device.type == "cpu":
        return True
    # A plan may be for GPUs that are not here.
    here = has_kernel(device) if torch.cuda.is_available() else device.type == "cuda"
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    return here and computes(dtype, layer.head)
