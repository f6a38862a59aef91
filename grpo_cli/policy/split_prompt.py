"""A prompt that goes through the model once for completions that go through it in parts.

For groups that do not fit into one micro-batch. The prompt's keys and values are detached from its graph and take part in every
forward of some of the completions; each backward adds to their gradients; one backward of the prompt at the end carries these
on. The gradient is exactly that of the whole group at once, with the memory of the prompt and one part.
"""

import torch
from torch import Tensor


class SplitPrompt:
    """The states of one prompt between the forwards that need them. The first of these forwards computes them.

    Args:
        ids: Prompt tokens.
    """

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self._computed: dict[int, tuple[Tensor, ...]] = {}
        self._leaves: dict[int, tuple[Tensor, ...]] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    @property
    def is_computed(self) -> bool:
        """Whether the prompt has gone through the model."""
        return self._last is not None

    @property
    def last_hidden(self) -> Tensor:
        """State that predicts first tokens, float [1, H]."""
        assert self._last is not None, "the prompt has not gone through the model"
        return self._last[1]

    def record(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep a layer's keys and values, float [1, K, P, D] each. What a recomputation in the backward records again is ignored."""
        if layer not in self._computed:
            self._computed[layer] = (key, value)
            self._leaves[layer] = (_leaf(key), _leaf(value))

    def close(self, last_hidden: Tensor) -> None:
        """Keep the prompt's last hidden state, float [1, H]: the prompt is computed."""
        self._last = (last_hidden, _leaf(last_hidden))

    def before(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put a layer's kept keys and values in front of those of completions: float [1, K, P + T, D]."""
        kept_key, kept_value = self._leaves[layer]
        return torch.cat([kept_key, key], dim=2), torch.cat([kept_value, value], dim=2)

    def loss(self) -> Tensor | None:
        """Give a scalar whose gradient is what the completions' backwards left for the prompt; None if that is nothing.

        Its value means nothing. It is a scalar, so that it can go wherever losses go.
        """
        pairs = [
            pair for layer, states in self._computed.items() for pair in zip(states, self._leaves[layer], strict=True)
        ]
        if self._last is not None:
            pairs.append(self._last)
        terms = [(computed * leaf.grad).sum(dtype=torch.float32) for computed, leaf in pairs if leaf.grad is not None]
        return torch.stack(terms).sum() if terms else None


def _leaf(states: Tensor) -> Tensor:
    """Cut states off their graph, to collect their gradient."""
    return states.detach().requires_grad_(states.requires_grad)
