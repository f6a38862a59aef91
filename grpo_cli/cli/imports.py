"""How a command imports the large libraries that it works with."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import without looking for garbage, neither meanwhile nor ever after, nor at the end: modules never become any.

    The looking is a fifth of the processor time of a command that does little else.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
