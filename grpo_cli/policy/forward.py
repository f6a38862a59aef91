"""One forward for old, reference and current log-probabilities: segments in, `TokenStats` out.

How segments are laid out for the model is this stage's own business (see `layout`); the objective sees completion tokens one
after another, whatever the layout.
"""

from typing import Any

import torch
from torch import Tensor, nn

from grpo_cli.policy import shared_prefix
from grpo_cli.policy.head import LogitScaling, statistics_of_logits, token_statistics
from grpo_cli.policy.layout import Layout, completions_row, packed_row, padded_rows
from grpo_cli.policy.router import load_balancing_loss
from grpo_cli.policy.shared_prefix import PackedRow
from grpo_cli.policy.split_prompt import SplitPrompt
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
        """Feed prompts once. The model must attend through transformers' interface, to everything before or through a window.

        Raises:
            ValueError: If it does not.
        """
        implementation = self.model.config._attn_implementation  # noqa: SLF001  there is no public name
        config = self.model.config.get_text_config()
        if getattr(self.model, "_is_stateful", False):
            raise ValueError("its layers carry a recurrent state")
        if implementation not in {*shared_prefix.NAMES, *shared_prefix.NAMES.values()}:
            raise ValueError(f"its attention is {implementation}")
        if has_windows(config) and config.model_type not in shared_prefix.WINDOWED_FAMILIES:
            raise ValueError("its layers do not all attend to everything before")
        self.model.set_attn_implementation(shared_prefix.NAMES.get(implementation, implementation))
        self.shares_prefix = True

    def feed_prompts_apart(self) -> None:
        """Undo `share_prefix`."""
        present = self.model.config._attn_implementation  # noqa: SLF001
        plain = {name: implementation for implementation, name in shared_prefix.NAMES.items()}
        self.model.set_attn_implementation(plain.get(present, present))
        self.shares_prefix = False

    def forward(
        self,
        segments: tuple[Segment, ...],
        *,
        entropy_grad: bool = False,
        router_loss: bool = False,
        prompt: SplitPrompt | None = None,
    ) -> TokenStats:
        """Compute log-probability and entropy of every completion token.

        Args:
            segments: Prompts with completions; at least one completion in all.
            entropy_grad: Whether the entropies are differentiable.
            router_loss: Whether to compute the load-balancing loss of a mixture of experts; not for a part of a group.
            prompt: The prompt of the one segment, which is a part of a group: it goes through the model with the first part only.
                Needs `shares_prefix`.

        Returns:
            Statistics in the order of the segments' completion tokens.
        """
        if prompt is not None:
            assert not router_loss
            return self._part_of_a_group(segments, prompt, entropy_grad=entropy_grad)
        layout = (packed_row if self.shares_prefix else padded_rows)(segments)
        # Counted before the layout moves: asking a device would wait for it.
        useful = int(layout.multiplicity.count_nonzero())
        sequence_tokens = int(layout.multiplicity.sum())
        layout = layout.to(self._device)
        packed = PackedRow(layout.prefixes, self._device) if layout.prefixes else None
        common = self._common(layout, entropy_grad=entropy_grad)
        inputs = _inputs(layout, packed) | ({"output_router_logits": True} if router_loss else {})
        if self.full_logits:
            outputs = self.model(**inputs)
            logits = outputs.logits[layout.row, layout.column].float()
            logps, entropies = statistics_of_logits(logits, **common)
        else:
            outputs = self.model.get_decoder()(**inputs)
            hidden = outputs.last_hidden_state[layout.row, layout.column]
            logps, entropies = token_statistics(hidden, head=self._head, scaling=self.scaling, **common)
        return TokenStats(
            logps=logps.float(),
            entropies=entropies.float(),
            tokens_useful=useful,
            tokens_computed=layout.ids.numel(),
            router_loss=self._router_loss(outputs.router_logits, layout.multiplicity) if router_loss else None,
            router_tokens=sequence_tokens if router_loss else 0,
        )

    def _part_of_a_group(self, segments: tuple[Segment, ...], prompt: SplitPrompt, *, entropy_grad: bool) -> TokenStats:
        """Compute the statistics of completions whose prompt is, or will have been, computed by itself."""
        assert self.shares_prefix
        (segment,) = segments
        assert segment.prompt_ids == prompt.ids
        fed = 0
        if not prompt.is_computed:
            layout = packed_row((Segment(prompt_ids=prompt.ids, completion_ids=((0,),)),)).to(self._device)
            fed = layout.ids.numel()
            prompt.close(self._hidden(layout, PackedRow(layout.prefixes, self._device, records=prompt))[0, -1:])
        layout = completions_row(segment)
        fed += layout.ids.numel()
        layout = layout.to(self._device)
        states = prompt.last_hidden
        if layout.ids.numel():
            hidden = self._hidden(layout, PackedRow(layout.prefixes, self._device, continues=prompt))[0]
            states = torch.cat([hidden, states])  # so that place -1 is the prompt's last state
        logps, entropies = token_statistics(
            states[layout.column],
            head=self._head,
            scaling=self.scaling,
            **self._common(layout, entropy_grad=entropy_grad),
        )
        return TokenStats(logps=logps.float(), entropies=entropies.float(), tokens_useful=fed, tokens_computed=fed)

    def _router_loss(self, router_logits: tuple[Tensor, ...], multiplicity: Tensor) -> Tensor:
        """Compute the load-balancing loss of all tokens of a layout."""
        experts_per_token = self.model.config.get_text_config().num_experts_per_tok
        return load_balancing_loss(router_logits, multiplicity.flatten(), experts_per_token=experts_per_token)

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def _head(self) -> nn.Module:
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def _hidden(self, layout: Layout, packed: PackedRow | None) -> Tensor:
        """Last hidden states [N, T, H]."""
        hidden: Tensor = self.model.get_decoder()(**_inputs(layout, packed)).last_hidden_state
        return hidden

    def _common(self, layout: Layout, *, entropy_grad: bool) -> dict[str, Any]:
        """What every way of computing statistics takes."""
        return {
            "targets": layout.targets,
            "positions": layout.target_positions,
            "sampling": self.sampling,
            "entropy_grad": entropy_grad,
        }


def _inputs(layout: Layout, packed: PackedRow | None) -> dict[str, Any]:
    """Give what the model is called with."""
    if packed is None:
        mask = (layout.multiplicity > 0).long()
        return {"input_ids": layout.ids, "attention_mask": mask, "use_cache": False}
    return {
        "input_ids": layout.ids,
        # A mask of four dimensions is taken as finished: the model builds none, and the attention function needs none.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=layout.ids.device),
        "position_ids": layout.positions,
        "packed": packed,
        "use_cache": False,
    }
