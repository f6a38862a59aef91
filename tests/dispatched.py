"""The operations that torch carries out, kept as they are called."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps each operation's name and arguments while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        """Arguments of all calls of some operations."""
        return [arguments for name, arguments in self.calls if name in names]
