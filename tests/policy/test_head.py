"""The chunked language-model head against full logits in float64, written out row by row without an infinity."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from grpo_cli.distribution import filter_logits
from grpo_cli.policy import head as head_module
from grpo_cli.policy.head import LogitScaling, is_plain_linear, statistics_of_logits, token_statistics
from grpo_cli.types import Sampling

VOCABULARY, WIDTH = 29, 6
STOPS = (3, 7)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "factor": {"scaling": {"factor": 0.3}},
    "softcap": {"scaling": {"softcap": 2.5}, "bias": True},
    "temperature": {"sampling": {"temperature": 0.7}},
    "greedy": {"sampling": {"temperature": 0.0}},
    "top_k": {"sampling": {"top_k": 4}},
    "top_k of all": {"sampling": {"top_k": VOCABULARY}},
    "top_p": {"sampling": {"top_p": 0.6}},
    "min_p": {"sampling": {"min_p": 0.2}},
    "min_tokens": {"sampling": {"min_tokens": 4}},
    "min_tokens of no stop": {"sampling": {"min_tokens": 4, "stop_ids": ()}},
    "all": {
        "bias": True,
        "scaling": {"factor": 1.7, "softcap": 3.0},
        "sampling": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "min_tokens": 4},
    },
}


def sampling_of(setting: dict[str, Any]) -> Sampling:
    return Sampling(**{"stop_ids": STOPS, "max_tokens": 64, **setting.get("sampling", {})})


def problem(
    tokens: int, *, bias: bool = False, dtype: torch.dtype = torch.float64, width: int = WIDTH, seed: int = 0
) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """Hidden states, a head, targets that are never a stop token, and positions."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = nn.Linear(width, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    targets = torch.randint(max(STOPS) + 1, VOCABULARY, (tokens,), generator=generator)
    return hidden, head, targets, torch.arange(tokens) % 9


def by_definition(
    hidden: Tensor, head: nn.Linear, targets: Tensor, positions: Tensor, setting: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies over the tokens that can be drawn, one row after the other."""
    sampling, scaling = sampling_of(setting), setting.get("scaling", {})
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * scaling.get("factor", 1.0)
    if cap := scaling.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    logits = logits / (sampling.temperature or 1.0)
    logps, entropies = [], []
    for row, target, position in zip(logits, targets.tolist(), positions.tolist(), strict=True):
        stops = set(sampling.stop_ids) if position < sampling.min_tokens else set()
        drawable = [token for token in range(VOCABULARY) if token not in stops and row[token] > -torch.inf]
        filtered = filter_logits(
            row[drawable].detach(), top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
        )
        kept = [
            token
            for token, logit in zip(drawable, filtered.tolist(), strict=True)
            if logit > -torch.inf or token == target
        ]
        log_probabilities = row[kept] - row[kept].logsumexp(dim=0)
        logps.append(log_probabilities[kept.index(target)])
        entropies.append(-(log_probabilities.exp() * log_probabilities).sum())
    return torch.stack(logps), torch.stack(entropies)


def statistics(
    hidden: Tensor, head: nn.Module, targets: Tensor, positions: Tensor, setting: dict[str, Any], *, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    return token_statistics(
        hidden,
        head=head,
        scaling=LogitScaling(**setting.get("scaling", {})),
        targets=targets,
        positions=positions,
        sampling=sampling_of(setting),
        entropy_grad=entropy_grad,
    )


def gradients(outcome: tuple[Tensor, Tensor], inputs: list[Tensor], *, entropy_grad: bool) -> tuple[Tensor, ...]:
    """Gradients of a weighted sum of log-probabilities and, if they are differentiable, of entropies."""
    weights = torch.linspace(-1.0, 2.0, len(outcome[0]), dtype=outcome[0].dtype)
    loss = outcome[0] @ weights
    if entropy_grad:
        loss = loss + outcome[1] @ weights.flip(0).square()
    return torch.autograd.grad(loss, inputs)


def assert_equal(found: Any, expected: Any) -> None:
    """Equal but for the rounding of float64."""
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def set_rows_per_chunk(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(head_module, "LOGITS_PER_CHUNK", rows * VOCABULARY)


def keep_general(head: nn.Module) -> nn.Module:
    """Hook a head, as sharding wrappers do: it has to be called as a module."""
    head.register_forward_hook(lambda *_: None)
    return head


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("entropy_grad", [False, True], ids=["", "entropy gradient"])
@pytest.mark.parametrize("prepare", [lambda head: head, keep_general], ids=["linear", "general"])
def test_values_and_gradients_equal_those_of_full_logits(
    setting: dict[str, Any],
    entropy_grad: bool,
    prepare: Callable[[nn.Module], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_rows_per_chunk(monkeypatch, 5)
    hidden, head, targets, positions = problem(13, bias=setting.get("bias", False))
    inputs = [hidden, *head.parameters()]
    expected = by_definition(hidden, head, targets, positions, setting)
    expected_gradients = gradients(expected, inputs, entropy_grad=entropy_grad)

    outcome = statistics(hidden, prepare(head), targets, positions, setting, entropy_grad=entropy_grad)
    assert outcome[1].requires_grad is entropy_grad
    assert_equal(outcome, expected)
    assert_equal(gradients(outcome, inputs, entropy_grad=entropy_grad), expected_gradients)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 7, 8, 9, 12])
@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_chunks_of_any_size_give_the_same(tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens than a chunk has rows, as many, more, and multiples of it."""
    set_rows_per_chunk(monkeypatch, rows)
    hidden, head, targets, positions = problem(tokens)
    expected = by_definition(hidden, head, targets, positions, {})
    outcome = statistics(hidden, head, targets, positions, {}, entropy_grad=True)
    assert_equal(outcome, expected)
    assert_equal(*(gradients(values, [hidden, head.weight], entropy_grad=True) for values in (outcome, expected)))


@pytest.mark.parametrize("name", ["bias", "softcap", "temperature", "min_tokens"])
def test_gradients_are_finite_differences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_rows_per_chunk(monkeypatch, 2)
    setting = SETTINGS[name]
    hidden, head, targets, positions = problem(5, bias=True)

    def outcome(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        given = nn.Linear(WIDTH, VOCABULARY)
        del given.weight, given.bias
        given.weight, given.bias = weight, bias  # type: ignore[assignment]
        assert is_plain_linear(given)
        return statistics(hidden, given, targets, positions, setting, entropy_grad=True)

    values = [value.detach().clone().requires_grad_() for value in (hidden, head.weight, head.bias)]
    assert torch.autograd.gradcheck(outcome, values)


def test_a_second_derivative_is_refused() -> None:
    hidden, head, targets, positions = problem(5)
    logps, _ = statistics(hidden, head, targets, positions, {}, entropy_grad=False)
    (gradient,) = torch.autograd.grad(logps.exp().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(gradient.sum())


def test_an_impossible_target_is_minus_infinity_and_poisons_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop token before `min_tokens`: no logit of its own to learn from, and no NaN anywhere."""
    set_rows_per_chunk(monkeypatch, 2)
    setting = {"sampling": {"min_tokens": 9, "top_p": 0.9}}
    hidden, head, targets, positions = problem(5)
    others = torch.tensor([0, 1, 3, 4])
    expected = by_definition(hidden[others], head, targets[others], positions[others], setting)
    targets[2] = STOPS[0]

    logps, entropies = statistics(hidden, head, targets, positions, setting, entropy_grad=True)
    assert logps[2] == -torch.inf
    assert torch.isfinite(entropies).all()
    assert_equal((logps[others], entropies[others]), expected)
    found = torch.autograd.grad(logps[others].sum() + entropies[others].sum(), [hidden, head.weight], retain_graph=True)
    assert_equal(found, torch.autograd.grad(expected[0].sum() + expected[1].sum(), [hidden, head.weight]))
    # Through the impossible target itself nothing but the other logits' share flows, as in the general form.
    general = statistics(hidden, keep_general(head), targets, positions, setting, entropy_grad=True)
    assert_equal(
        torch.autograd.grad(logps[2], [hidden, head.weight]), torch.autograd.grad(general[0][2], [hidden, head.weight])
    )


def test_given_logits_are_left_as_they_are() -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    before, targets = logits.clone(), torch.tensor([9, 10, 11])
    sampling = sampling_of({"sampling": {"top_k": 2, "min_tokens": 2}})
    statistics_of_logits(logits, targets=targets, positions=targets % 3, sampling=sampling, entropy_grad=False)
    assert torch.equal(logits, before)


def test_a_bias_of_minus_infinity_removes_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    set_rows_per_chunk(monkeypatch, 2)
    hidden, head, targets, positions = problem(5, bias=True)
    targets.fill_(20)
    with torch.no_grad():
        head.bias[11:14] = -torch.inf
    inputs = [hidden, *head.parameters()]
    expected = by_definition(hidden, head, targets, positions, {})
    outcome = statistics(hidden, head, targets, positions, {}, entropy_grad=True)
    assert_equal(outcome, expected)
    assert_equal(gradients(outcome, inputs, entropy_grad=True), gradients(expected, inputs, entropy_grad=True))


def test_near_certain_tokens_keep_their_digits() -> None:
    """An identity as the head makes the logits known exactly: 100 and others some 14 below, so that log p is about -1e-5."""
    generator = torch.Generator().manual_seed(0)
    logits = 86.0 + torch.rand(8, VOCABULARY, generator=generator)
    logits[:, 4] = 100.0
    head = nn.Linear(VOCABULARY, VOCABULARY, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(VOCABULARY))
    targets = torch.full((8,), 4)
    logps, entropies = statistics(logits, head, targets, targets, {}, entropy_grad=False)
    exact = logits.double().log_softmax(dim=-1)
    assert logps.dtype == entropies.dtype == torch.float32
    # log(1 + x) of a sum in float32 is known to 1e-7, the entropy's other part to full relative precision.
    torch.testing.assert_close(logps.double(), exact[:, 4], rtol=0, atol=1.5e-7)
    torch.testing.assert_close(entropies.double(), torch.special.entr(exact.exp()).sum(dim=-1), rtol=0, atol=2e-7)


def in_float64(
    hidden: Tensor, head: nn.Linear, targets: Tensor, positions: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """What is exact for hidden states and a head that are rounded already: values, and gradients through both of them."""
    hidden = hidden.detach().double().requires_grad_()
    exact = nn.Linear(head.in_features, VOCABULARY, dtype=torch.float64)
    exact.load_state_dict(head.state_dict())
    values = by_definition(hidden, exact, targets, positions, {})
    return values, gradients(values, [hidden, *exact.parameters()], entropy_grad=True)


def test_the_weight_gradient_of_a_bfloat16_head_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred chunks, each of which would round again if the sum were kept in bfloat16 (half a unit: 2^-8)."""
    set_rows_per_chunk(monkeypatch, 3)
    hidden, head, targets, positions = problem(300, dtype=torch.bfloat16, bias=True)
    outcome = statistics(hidden, head, targets, positions, {}, entropy_grad=True)
    found = gradients(outcome, [hidden, *head.parameters()], entropy_grad=True)

    expected, exact_gradients = in_float64(hidden, head, targets, positions)
    torch.testing.assert_close(tuple(value.double() for value in outcome), expected, rtol=0, atol=1e-5)
    for value, exact in zip(found, exact_gradients, strict=True):
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.double(), exact, rtol=2**-8, atol=1e-4 * float(exact.abs().max()))


def test_autocast_on_a_cpu_loses_no_precision() -> None:
    hidden, head, targets, positions = problem(13, dtype=torch.float32, bias=True)
    inputs = [hidden, *head.parameters()]
    expected = statistics(hidden, head, targets, positions, {}, entropy_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outcome = statistics(hidden, head, targets, positions, {}, entropy_grad=True)
        found = gradients(outcome, inputs, entropy_grad=True)
    assert all(torch.equal(one, other) for one, other in zip(outcome, expected, strict=True))
    for value, exact in zip(found, gradients(expected, inputs, entropy_grad=True), strict=True):
        torch.testing.assert_close(value, exact, rtol=1e-2, atol=1e-2)  # the test's own products are in bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_on_a_gpu_sums_in_float32(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "LOGITS_PER_CHUNK_ON_ACCELERATORS", 64 * VOCABULARY)
    hidden, head, targets, positions = problem(300, dtype=torch.bfloat16, width=64, bias=True)
    expected, exact_gradients = in_float64(hidden, head, targets, positions)
    dtype = torch.float32 if autocast else torch.bfloat16
    head = head.to("cuda", dtype)
    hidden = hidden.detach().to("cuda", dtype).requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        outcome = statistics(hidden, head, targets.cuda(), positions.cuda(), {}, entropy_grad=True)
    found = gradients((outcome[0].cpu(), outcome[1].cpu()), [hidden, *head.parameters()], entropy_grad=True)
    torch.testing.assert_close(tuple(value.cpu().double() for value in outcome), expected, rtol=0, atol=1e-4)
    for value, exact in zip(found, exact_gradients, strict=True):
        torch.testing.assert_close(value.cpu().double(), exact, rtol=2**-7, atol=2**-7 * float(exact.abs().max()))


def test_a_tied_head_adds_to_the_gradient_of_its_embedding() -> None:
    _, head, targets, positions = problem(13)
    ids = torch.arange(13) % 5
    embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
    head.weight = embedding.weight
    expected = by_definition(embedding(ids).sin(), head, targets, positions, {})
    outcome = statistics(embedding(ids).sin(), head, targets, positions, {}, entropy_grad=False)
    assert_equal(
        gradients(outcome, [head.weight], entropy_grad=False), gradients(expected, [head.weight], entropy_grad=False)
    )


@pytest.mark.parametrize("way", ["lora", "modules_to_save"])
def test_an_adapted_head_is_called_as_a_module(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_rows_per_chunk(monkeypatch, 5)
    hidden, head, targets, positions = problem(13)
    layers = (
        {"target_modules": ["head"]} if way == "lora" else {"target_modules": ["body"], "modules_to_save": ["head"]}
    )
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": head})
    adapted = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **layers)).model["head"].double()
    assert not is_plain_linear(adapted)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert trained
    expected = statistics_of_logits(
        adapted(hidden), targets=targets, positions=positions, sampling=sampling_of({}), entropy_grad=True
    )
    outcome = statistics(hidden, adapted, targets, positions, {}, entropy_grad=True)
    assert_equal(outcome, expected)
    assert_equal(
        gradients(outcome, [hidden, *trained], entropy_grad=True),
        gradients(expected, [hidden, *trained], entropy_grad=True),
    )


def test_only_a_head_that_is_nothing_but_linear_is_plain() -> None:
    class Subclass(nn.Linear):
        pass

    replaced = nn.Linear(3, 4)
    replaced.forward = lambda input: input  # type: ignore[method-assign]  # noqa: A006  torch's name
    hooked = nn.Linear(3, 4)
    hooked.register_forward_pre_hook(lambda *_: None)
    sharded = nn.Linear(3, 4)
    sharded.weight = nn.UninitializedParameter()  # any type of its own, as a DTensor is one
    assert is_plain_linear(nn.Linear(3, 4))
    assert not is_plain_linear(Subclass(3, 4))
    assert not is_plain_linear(parametrizations.weight_norm(nn.Linear(3, 4)))
    assert not is_plain_linear(keep_general(nn.Linear(3, 4)))
    assert not is_plain_linear(hooked)
    assert not is_plain_linear(replaced)
    assert not is_plain_linear(sharded)
