"""What the language-model head costs: products, saved tensors, and memory."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_cli.policy import head as head_module
from grpo_cli.policy import products as products_module
from grpo_cli.policy.head import LogitScaling, token_statistics
from grpo_cli.types import Sampling

TOKENS, WIDTH, VOCABULARY, ROWS = 8, 6, 29, 4
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.mkldnn._linear_pointwise}


def statistics(hidden: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
    targets = torch.arange(len(hidden)) % VOCABULARY
    return token_statistics(
        hidden,
        head=head,
        scaling=LogitScaling(),
        targets=targets,
        positions=targets,
        sampling=Sampling(stop_ids=(), max_tokens=TOKENS),
        entropy_grad=True,
    )


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the shape of every matrix product's outcome."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outcome = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            self.shapes.append(tuple(outcome.shape))
        return outcome


@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",)], ids=str)
def test_no_product_is_computed_in_vain(frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Per chunk: the logits twice, and one product for each gradient that is wanted."""
    monkeypatch.setattr(head_module, "LOGITS_PER_CHUNK", ROWS * VOCABULARY)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight.requires_grad_("weight" not in frozen)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad="hidden" not in frozen)
    with Products() as products:
        logps, _ = statistics(hidden, head)
        torch.autograd.backward(logps.sum())
    logits, of_hidden, of_weight = (ROWS, VOCABULARY), (ROWS, WIDTH), (VOCABULARY, WIDTH)
    wanted = [logits] * 4
    wanted += [] if "hidden" in frozen else [of_hidden] * 2
    wanted += [] if "weight" in frozen else [of_weight] * 2
    assert sorted(products.shapes) == sorted(wanted)


def test_a_sum_of_rounded_factors_needs_no_second_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, here on a device without numbers: products of half precision are added a few rows at a time."""
    monkeypatch.setattr(products_module, "ROWS_AT_ONCE", 10)
    left, right = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((VOCABULARY, ROWS), (ROWS, WIDTH))
    )
    with Products() as products:
        products_module.add_product(left, right, to=torch.empty(VOCABULARY, WIDTH, device="meta"))
    assert products.shapes == [(10, WIDTH), (10, WIDTH), (9, WIDTH)]


def test_only_inputs_and_a_few_numbers_per_token_are_saved() -> None:
    hidden, head = torch.randn(40, WIDTH, requires_grad=True), nn.Linear(WIDTH, VOCABULARY, bias=False)
    saved: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        saved.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        with torch.no_grad():
            logps, _ = statistics(hidden, head)
        assert saved == []
        assert not logps.requires_grad
        statistics(hidden, head)
    inputs = {hidden.data_ptr(), head.weight.data_ptr()}
    assert inputs <= {value.data_ptr() for value in saved}
    assert sum(value.numel() for value in saved if value.data_ptr() not in inputs) <= 8 * len(hidden)


LARGE_VOCABULARY = """
import torch
from torch import nn
from grpo_cli.policy.head import LogitScaling, token_statistics
from grpo_cli.types import Sampling

def resident(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

tokens, vocabulary, width = 1000, 262144, 4
hidden = torch.randn(tokens, width, requires_grad=True)
head = nn.Linear(width, vocabulary, bias=False)
targets = torch.arange(tokens)
before = resident("VmRSS")  # not the highest so far, which the imports may have set
logps, _ = token_statistics(
    hidden, head=head, scaling=LogitScaling(), targets=targets, positions=targets,
    sampling=Sampling(stop_ids=(), max_tokens=tokens), entropy_grad=False,
)
logps.sum().backward()
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """The logits of 1000 tokens over 262144 words are 1 GiB in float32; two to five chunks of 16 MiB are resident."""
    outcome = subprocess.run([sys.executable, "-c", LARGE_VOCABULARY], capture_output=True, text=True, check=True)
    grown = int(outcome.stdout)
    assert 2**24 < grown < 100 * 2**20
