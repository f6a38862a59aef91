"""The hooks with which libraries bring the parts of a module's weights together before it computes, and take them apart after it."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Let a model compute with the weights that are there."""
    hooked = [(module, module._forward_pre_hooks, module._forward_hooks) for module in model.modules()]  # noqa: SLF001
    for module, *_ in hooked:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()  # noqa: SLF001
    try:
        yield
    finally:
        for module, before, after in hooked:
            module._forward_pre_hooks, module._forward_hooks = before, after  # noqa: SLF001
