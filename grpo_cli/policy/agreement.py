"""Self-check at start: the fast ways to compute log-probabilities say what the model itself says, in value and in gradient.

The model itself is the padded row with the model's own logits. Compared with it, one after the other: the head applied to
completion positions only, prompts that are fed once for all their completions, and prompts that are fed once for parts of them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from grpo_cli.device_memory import is_out_of_memory
from grpo_cli.errors import ModelError
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.split_prompt import SplitPrompt
from grpo_cli.precision import computing_dtype, is_reduced
from grpo_cli.types import Segment

TOLERANCE = 1e-3
"""Root mean square of the differences between log-probabilities, and relative difference between gradients, that float32 or better gives."""

ROUNDINGS = 2.0
"""In reduced precision a fast way may differ by this many times what one rounding more does to the model itself."""

LARGEST_LIMIT = 1.0
"""However much rounding does: what differs by more does not agree."""

REPETITION_TOLERANCE = 0.1
"""As `TOLERANCE`, for two calls on the same tokens in reduced precision: some kernels add up in any order."""

LENGTH_OF_A_REASON = 160
"""Characters of an error's message that a notice repeats."""

Piece = tuple[tuple[Segment, ...], SplitPrompt | None]
"""What one forward computes: segments, and their prompt if they are a part of a group."""


def choose_forward(
    policy: PolicyModel,
    segments: tuple[Segment, ...],
    *,
    share_prefix: bool = True,
    longest: int | None = None,
    with_gradients: bool = True,
) -> list[str]:
    """Let the policy compute in the fastest way that agrees with the model itself.

    Args:
        policy: Its `full_logits`, `shares_prefix` and `splits_prompts` are set.
        segments: Real prompts with a few tokens each; at least one with two completions.
        share_prefix: Whether a prompt may be fed once for its completions.
        longest: Tokens of the longest sequence there will be, prompt and completion; None: not known.
        with_gradients: Whether to compare gradients, too, which need the weights of the first layer in one piece.

    Returns:
        One line of notice for each fast way that does not work with this model.

    Raises:
        ModelError: If two calls on the same tokens differ, or what the model gives is not a number.
    """
    kind = type(policy.model).__name__
    whole: list[Piece] = [(segments, None)]
    with _whole_distribution(policy):
        policy.full_logits = True
        probe = _Probe.of(policy, segments, _first_trained(policy.model) if with_gradients else [])
        policy.full_logits = False
        if reason := probe.disagreement(policy, whole, "the chunked head"):
            policy.full_logits = True
            return [f"{kind}: its full logits are used, in padded rows, which needs more memory and time: {reason}"]
        if not share_prefix:
            return []
        try:
            policy.share_prefix(longest)
        except ValueError as error:
            return [f"{kind}: prompts are fed once per completion, in padded rows: {_in_one_line(error)}"]
        notices = []
        if reason := probe.disagreement(policy, whole, "a packed row in blocks"):
            policy.attends_in_blocks = False
            if again := probe.disagreement(policy, whole, "a packed row"):
                policy.feed_prompts_apart()
                return [f"{kind}: prompts are fed once per completion, in padded rows: {again}"]
            notices.append(f"{kind}: completions attend to their prompt through masks, in more memory: {reason}")
        if reason := probe.disagreement(policy, _in_parts(segments), "a group in parts"):
            policy.splits_prompts = False
            notices.append(f"{kind}: a group in several micro-batches is fed its prompt with each of them: {reason}")
    return notices


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """Log-probabilities float [C], and the gradient float32 [..] of a weighted sum of them."""

    logps: Tensor
    gradient: Tensor

    def difference(self, other: "_Outcome") -> tuple[float, float]:
        """Root mean square of the differences between log-probabilities, and relative difference between gradients.

        Means, since single numbers in reduced precision say little.
        """
        gradient = (self.gradient - other.gradient).norm() / other.gradient.norm().clamp(min=1e-30)
        return _distance(self.logps, other.logps), gradient.nan_to_num(nan=math.inf).item()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probe:
    """What the model itself says about some segments, and how much another way may differ.

    Attributes:
        own: What it says.
        limits: Of the two numbers of `_Outcome.difference`.
        parameters: What the gradient is taken with respect to.
    """

    own: _Outcome
    limits: tuple[float, float]
    parameters: Sequence[nn.Parameter]

    @classmethod
    def of(cls, policy: PolicyModel, segments: tuple[Segment, ...], parameters: Sequence[nn.Parameter]) -> "_Probe":
        """Ask the model itself.

        Raises:
            ModelError: As `choose_forward` says.
        """
        own = _outcome(policy, [(segments, None)], parameters)
        dtype = computing_dtype(policy)
        rounds = is_reduced(dtype)
        _check_numbers(policy, segments, own.logps, tolerance=REPETITION_TOLERANCE if rounds else TOLERANCE)
        limits = TOLERANCE, TOLERANCE
        if rounds:
            with _nudged(policy, dtype):
                rounding = _outcome(policy, [(segments, None)], parameters).difference(own)
            limits = _limit(rounding[0]), _limit(rounding[1])
        return cls(own=own, limits=limits, parameters=parameters)

    def disagreement(self, policy: PolicyModel, pieces: Iterable[Piece], way: str) -> str | None:
        """Say in what the policy, as it is set now, does not agree with the model itself; None if it does. `way` names the setting."""
        try:
            found = _outcome(policy, pieces, self.parameters)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            # The model has no usual decoder or head, or its forward takes no packed row.
            if is_out_of_memory(error):
                raise
            return f"{way} is not possible ({_in_words(error)})"
        logps, gradient = found.difference(self.own)
        if not logps <= self.limits[0]:
            return f"log-probabilities of {way} differ by {logps:.2g}"
        if not gradient <= self.limits[1]:
            return f"the gradient of {way} differs by {gradient:.2g}"
        return None


def _check_numbers(policy: PolicyModel, segments: tuple[Segment, ...], logps: Tensor, *, tolerance: float) -> None:
    """Raise if log-probabilities are no numbers, or others in a second call."""
    kind = type(policy.model).__name__
    if logps.isnan().any():
        raise ModelError(
            f"model: {kind} gives log-probabilities that are not numbers (NaN)",
            hint="are its weights complete? try model.dtype: float32 or another model.attn_implementation",
        )
    with torch.no_grad():
        again = policy(segments).logps
    noise = _distance(again, logps)
    if noise > tolerance:
        raise ModelError(
            f"model: {kind} is not deterministic in training mode: "
            f"the log-probabilities of the same tokens differ by {noise:.2g} between two calls",
            hint="set what is random in its forward (dropout, skipped layers, router noise) to 0 in its config.json",
        )


def _limit(rounding: float) -> float:
    """Decide how much a fast way may differ where one rounding more makes this difference."""
    return min(max(TOLERANCE, ROUNDINGS * rounding), LARGEST_LIMIT)


def _distance(one: Tensor, other: Tensor) -> float:
    """Root mean square of differences. Equal infinities do not differ, and NaN (in one of them) is larger than any limit."""
    differences = (one - other).masked_fill(one == other, 0.0)
    return differences.square().mean().sqrt().nan_to_num(nan=math.inf).item()


@contextmanager
def _nudged(policy: PolicyModel, dtype: torch.dtype) -> Iterator[None]:
    """Make every second number of the embeddings one unit in the last place larger, of the type that the model computes in.

    Every later rounding falls out in another way then, so what the model says differs by what rounding can do to it. The same
    rows without padding would say less: most of their roundings are the same.
    """
    embedding = policy.model.get_input_embeddings()

    def nudge(_module: nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
        units = torch.arange(embedded.shape[-1], device=embedded.device) % 2
        return embedded * (1 + units * torch.finfo(dtype).eps).to(embedded.dtype)

    handle = embedding.register_forward_hook(nudge)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _whole_distribution(policy: PolicyModel) -> Iterator[None]:
    """Leave out filters and banned stop tokens: they turn rounding into jumps, and give -inf to probe tokens they exclude."""
    sampling = policy.sampling
    policy.sampling = replace(sampling, top_k=0, top_p=1.0, min_p=0.0, min_tokens=0, banned_ids=())
    try:
        yield
    finally:
        policy.sampling = sampling


def _outcome(policy: PolicyModel, pieces: Iterable[Piece], parameters: Sequence[nn.Parameter]) -> _Outcome:
    """Compute log-probabilities piece by piece, and the gradient of a sum of them in which each completion token has its own weight."""
    pieces = list(pieces)
    tokens = sum(len(ids) for segments, _ in pieces for segment in segments for ids in segment.completion_ids)
    # All positive: a prompt of one token gives equal completions, whose gradients must not cancel.
    weights = torch.linspace(1, 2, tokens)
    prompts = list(dict.fromkeys(prompt for _, prompt in pieces if prompt is not None))
    found: list[Tensor] = []
    try:
        with torch.set_grad_enabled(bool(parameters)):
            for segments, prompt in pieces:
                logps: Tensor = policy(segments, prompt=prompt).logps
                found.append(logps.detach())
                share, weights = weights[: len(logps)].to(logps.device), weights[len(logps) :]
                leaves = [] if prompt is None else prompt.leaves
                _backward((logps * share).sum(), [*parameters, *leaves])
            for prompt in prompts:
                _backward(prompt.loss(), parameters)
        gradients = [_gradient(parameter).flatten().float() for parameter in parameters]
    finally:
        for parameter in parameters:
            parameter.grad = None
    return _Outcome(logps=torch.cat(found), gradient=torch.cat([torch.zeros(1, device=found[0].device), *gradients]))


def _backward(loss: Tensor | None, inputs: Sequence[Tensor]) -> None:
    """Add a loss's gradient to that of the inputs alone; what no gradient leads to is left out."""
    if inputs and loss is not None and loss.requires_grad:
        torch.autograd.backward(loss, inputs=list(inputs))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Give a parameter's gradient: zeros if there is none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _first_trained(model: Any) -> list[nn.Parameter]:
    """Give the trained parameters of the first layer that has some, in which the gradients of all later layers meet.

    Those of all layers would be another copy of the model. A model without known layers is taken as a whole.
    """
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else model
    for part in chain(getattr(decoder, "layers", ()), [decoder]):
        if trained := [value for value in part.parameters() if value.requires_grad]:
            return trained
    return []


def _in_parts(segments: tuple[Segment, ...]) -> Iterator[Piece]:
    """Each group as two parts, with a prompt that goes through the model once for both."""
    for segment in segments:
        prompt = SplitPrompt(segment.prompt_ids)
        for part in (segment.completion_ids[:1], segment.completion_ids[1:]):
            if part:
                yield (replace(segment, completion_ids=part),), prompt


def _in_words(error: Exception) -> str:
    """Say for a person why a way of computing does not work with a model."""
    message = _in_one_line(error)
    match error:
        case ValueError():  # what a way itself refuses is a sentence already
            return message
        case TypeError():
            return "its forward takes arguments of its own"
        case AttributeError():
            return "it is not made of the parts that most models have"
        case _:
            return f"its forward fails: {message}"


def _in_one_line(error: Exception) -> str:
    """Shorten what an error says; those without a message have their kind only."""
    return shorten(str(error) or type(error).__name__, LENGTH_OF_A_REASON, placeholder=" ...")
