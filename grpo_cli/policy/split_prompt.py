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
        self._layers: dict[int, tuple[_State, _State]] = {}
        self._last: _State | None = None

    @property
    def is_computed(self) -> bool:
        """Whether the prompt has gone through the model."""
        return self._last is not None

    @property
    def last_hidden(self) -> Tensor:
        """State that predicts first tokens, float [1, H]."""
        assert self._last is not None, "the prompt has not gone through the model"
        return self._last.leaf

    @property
    def leaves(self) -> list[Tensor]:
        """What the completions' backwards must reach, if they are told which gradients to compute."""
        return [state.leaf for state in self._states() if state.leaf.requires_grad]

    def record(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep a layer's keys and values, float [1, K, P, D] each. What a recomputation in the backward records again is ignored.

        Raises:
            ValueError: If the layer attends more than once in the prompt's forward: there is one place for its keys.
        """
        if self.is_computed:
            return
        if layer in self._layers:
            raise ValueError(f"its layer {layer} attends more than once")
        self._layers[layer] = (_State(key), _State(value))

    def close(self, last_hidden: Tensor) -> None:
        """Keep the prompt's last hidden state, float [1, H]: the prompt is computed."""
        self._last = _State(last_hidden)

    def before(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put a layer's kept keys and values in front of those of completions: float [1, K, P + T, D]."""
        kept_key, kept_value = self._layers[layer]
        return torch.cat([kept_key.leaf, key], dim=2), torch.cat([kept_value.leaf, value], dim=2)

    def loss(self) -> Tensor | None:
        """Give a scalar whose gradient is what the completions' backwards left for the prompt; None if that is nothing.

        Its value means nothing. It is a scalar, so that it can go wherever losses go.
        """
        terms = [
            (state.computed * state.gradient.total).sum(dtype=torch.float32)
            for state in self._states()
            if state.gradient.total is not None
        ]
        return torch.stack(terms).sum() if terms else None

    def _states(self) -> list["_State"]:
        states = [state for pair in self._layers.values() for state in pair]
        return states if self._last is None else [*states, self._last]


class _State:
    """A tensor of the prompt's graph, and the leaf that completions read in its place."""

    def __init__(self, computed: Tensor) -> None:
        self.computed = computed
        self.leaf = computed.detach().requires_grad_(computed.requires_grad)
        self.gradient = _GradientSum()
        if computed.requires_grad:
            self.leaf.register_post_accumulate_grad_hook(self.gradient)  # type: ignore[no-untyped-call]


class _GradientSum:
    """Takes what each backward leaves in a leaf, and adds it up in float32 or better, whatever the leaf's precision.

    It does not know the leaf, which knows it: a cycle would keep the prompt's states until a garbage collection.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def __call__(self, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if self.total is None:
            self.total = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        else:
            self.total += gradient
