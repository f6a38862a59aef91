"""One forward for old, reference and current log-probabilities: segments in, `TokenStats` out.

How segments are laid out for the model is this stage's own business (see `layout`); the objective sees completion tokens one
after another, whatever the layout.
"""

from typing import Any

import torch
from torch import Tensor, nn

from grpo_cli.policy import shared_prefix
from grpo_cli.policy.head import LogitScaling, statistics_of_logits, token_statistics
from grpo_cli.policy.layout import Layout, packed_row, padded_rows
from grpo_cli.types import Sampling, Segment, TokenStats


def has_windows(config: Any) -> bool:
    """Tell whether some layer of a model attends to a part of what is before only; a short probe could not show it."""
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return bool(layers or getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None))


class PolicyModel(nn.Module):
    """A causal language model whose forward gives token statistics.

    It is this module that distributed wrappers wrap, so that their hooks see one forward with everything in it.

    Args:
        model: A transformers causal language model, possibly with adapters.
        sampling: The distribution that completions are drawn from in training.

    Attributes:
        shares_prefix: Whether a prompt is fed once for all its completions, in a packed row without padding.
        full_logits: Whether the model's own logits are taken at every position instead of applying the head to completion
            positions only: slower, for models whose head does more than `LogitScaling` knows.
    """

    def __init__(self, model: Any, *, sampling: Sampling) -> None:
        super().__init__()
        self.model = model
        self.sampling = sampling
        self.shares_prefix = False
        self.full_logits = False
        self.scaling = LogitScaling.of(model.config.get_text_config())

    def share_prefix(self) -> None:
        """Feed prompts once. The model must attend by scaled-dot-product attention, through transformers' interface.

        Raises:
            ValueError: If it does not.
        """
        implementation = self.model.config._attn_implementation  # noqa: SLF001  there is no public name
        if implementation not in {"sdpa", shared_prefix.NAME}:
            raise ValueError(f"its attention is {implementation}")
        config = self.model.config.get_text_config()
        if has_windows(config) and config.model_type not in shared_prefix.WINDOWED_FAMILIES:
            raise ValueError("its layers do not all attend to everything before")
        self.model.set_attn_implementation(shared_prefix.NAME)
        self.shares_prefix = True

    def feed_prompts_apart(self) -> None:
        """Undo `share_prefix`."""
        self.model.set_attn_implementation("sdpa")
        self.shares_prefix = False

    def forward(self, segments: tuple[Segment, ...], *, entropy_grad: bool = False) -> TokenStats:
        """Compute log-probability and entropy of every completion token.

        Args:
            segments: Prompts with completions; at least one completion in all.
            entropy_grad: Whether the entropies are differentiable.

        Returns:
            Statistics in the order of the segments' completion tokens.
        """
        layout = (packed_row if self.shares_prefix else padded_rows)(segments)
        useful = int(layout.attention_mask.sum())  # before it moves: asking a device would wait for it
        layout = layout.to(next(self.model.parameters()).device)
        logps, entropies = self._statistics(layout, entropy_grad=entropy_grad)
        return TokenStats(
            logps=logps,
            entropies=entropies,
            tokens_useful=useful,
            tokens_computed=layout.ids.numel(),
        )

    def _statistics(self, layout: Layout, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [C] of a layout's targets."""
        inputs: dict[str, Any] = {"input_ids": layout.ids, "attention_mask": layout.attention_mask, "use_cache": False}
        if layout.prefixes:
            # A mask of four dimensions is taken as finished: the model builds none, and the attention function needs none.
            inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=layout.ids.device)
            inputs |= {"position_ids": layout.positions, "prefixes": layout.prefixes}
        common: dict[str, Any] = {
            "targets": layout.targets,
            "positions": layout.target_positions,
            "sampling": self.sampling,
            "entropy_grad": entropy_grad,
        }
        if self.full_logits:
            return statistics_of_logits(self.model(**inputs).logits[layout.row, layout.column].float(), **common)
        hidden = self.model.get_decoder()(**inputs).last_hidden_state
        head = self.model.get_output_embeddings()
        return token_statistics(hidden[layout.row, layout.column], head=head, scaling=self.scaling, **common)
