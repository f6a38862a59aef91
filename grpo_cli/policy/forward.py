"""One forward for old, reference and current log-probabilities: `MicroBatch` in, `TokenStats` out.

This layout is the plain one: one row per completion, prompt and completion padded on the right. How rows are laid out is this
module's own business; the objective sees completion tokens one after another, whatever the layout.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_cli.policy.head import LogitScaling, statistics_of_logits, token_statistics
from grpo_cli.types import Sampling, Segment, TokenStats


class PolicyModel(nn.Module):
    """A causal language model whose forward gives token statistics.

    It is this module that distributed wrappers wrap, so that their hooks see one forward with everything in it.

    Args:
        model: A transformers causal language model, possibly with adapters.
        sampling: The distribution that completions are drawn from in training.
        full_logits: Take the model's own logits at every position instead of applying the head to completion positions only:
            slower, for models whose head does more than `LogitScaling` knows.
    """

    def __init__(self, model: Any, *, sampling: Sampling, full_logits: bool = False) -> None:
        super().__init__()
        self.model = model
        self.sampling = sampling
        self.full_logits = full_logits
        self.scaling = LogitScaling.of(model.config.get_text_config())

    def forward(self, segments: tuple[Segment, ...], *, entropy_grad: bool = False) -> TokenStats:
        """Compute log-probability and entropy of every completion token.

        Args:
            segments: Prompts with completions; at least one completion in all.
            entropy_grad: Whether the entropies are differentiable.

        Returns:
            Statistics in the order of the segments' completion tokens.
        """
        rows = _pad(segments, device=next(self.model.parameters()).device)
        inputs = {"input_ids": rows.ids, "attention_mask": rows.attention_mask, "use_cache": False}
        if self.full_logits:
            logits = self.model(**inputs).logits[rows.row, rows.column].float()
            logps, entropies = statistics_of_logits(
                logits,
                targets=rows.targets,
                positions=rows.positions,
                sampling=self.sampling,
                entropy_grad=entropy_grad,
            )
        else:
            hidden = self.model.get_decoder()(**inputs).last_hidden_state
            logps, entropies = token_statistics(
                hidden[rows.row, rows.column],
                head=self.model.get_output_embeddings(),
                scaling=self.scaling,
                targets=rows.targets,
                positions=rows.positions,
                sampling=self.sampling,
                entropy_grad=entropy_grad,
            )
        useful = int(rows.attention_mask.sum())
        return TokenStats(logps=logps, entropies=entropies, tokens_useful=useful, tokens_computed=rows.ids.numel())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Segments laid out as right-padded rows.

    Attributes:
        ids, attention_mask: int64 [N, T]. A completion's last token predicts nothing, so it is not fed.
        row, column: int64 [C], the position whose hidden state predicts each completion token.
        targets, positions: int64 [C], the completion tokens and their index within their completion.
    """

    ids: Tensor
    attention_mask: Tensor
    row: Tensor
    column: Tensor
    targets: Tensor
    positions: Tensor


def _pad(segments: tuple[Segment, ...], *, device: torch.device) -> _Rows:
    """Lay segments out as right-padded rows on a device."""
    pairs = [(segment.prompt_ids, completion) for segment in segments for completion in segment.completion_ids]
    width = max(len(prompt) + len(completion) - 1 for prompt, completion in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.long)
    attention_mask = torch.zeros_like(ids)
    row, column, positions = [], [], []
    for index, (prompt, completion) in enumerate(pairs):
        length = len(prompt) + len(completion) - 1
        ids[index, :length] = torch.tensor((prompt + completion)[:-1])
        attention_mask[index, :length] = 1
        row.append(torch.full((len(completion),), index))
        column.append(torch.arange(len(prompt) - 1, length))
        positions.append(torch.arange(len(completion)))
    targets = torch.tensor([token for _, completion in pairs for token in completion])
    rows = {
        "ids": ids,
        "attention_mask": attention_mask,
        "row": torch.cat(row),
        "column": torch.cat(column),
        "targets": targets,
        "positions": torch.cat(positions),
    }
    return _Rows(**{name: value.to(device) for name, value in rows.items()})
