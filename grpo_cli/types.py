"""The values that cross a border between two stages.

All are frozen. A field exists exactly when the stage that owns it has run; so there are three group types in a row
instead of one with holes. Letters in shapes, with one meaning across the project:

    G completions of a group      F reward functions       N completions of a micro-batch
    L tokens of one completion    C completion tokens of a micro-batch, packed one after another
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, NewType

from torch import Tensor

from grpo_cli.metrics import Metrics

PromptId = NewType("PromptId", str)
"""`epoch:row`: names one draw of one dataset row."""

PolicyVersion = NewType("PolicyVersion", int)
"""Number of optimizer steps behind the weights that sampled something."""

Message = Mapping[str, Any]
"""One chat turn: `{"role": ..., "content": ...}`."""


IMAGE = "image"
"""Dataset column of one image for each row; in a prompt's row its encoded bytes."""

IMAGES = "images"
"""Dataset column of a list of images for each row; in a prompt's row their encoded bytes."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model sampled a stop token or finished a stop string."""
    LENGTH = "length"
    """The completion reached its maximum length: it is truncated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One dataset row, ready to be sampled from.

    Attributes:
        uid: Which draw of which row.
        ids: Prompt tokens, chat template applied.
        text: The text those tokens were made of.
        messages: The chat turns of a conversational prompt; None for a plain string.
        row: All columns of the dataset row after `columns:` mapping, `prompt` included; of images the encoded bytes. Read only.
        images: Encoded (PNG, JPEG ...), in the order of their placeholders among the tokens.
    """

    uid: PromptId
    ids: tuple[int, ...]
    text: str
    messages: tuple[Message, ...] | None
    row: Mapping[str, Any]
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How completions are drawn from the policy's logits.

    Attributes:
        temperature: Logits are divided by it. 0 is greedy and allowed only in evaluation.
        top_p: Nucleus mass to keep; 1 keeps all.
        top_k: Number of tokens to keep; 0 keeps all.
        min_p: Least probability to keep, relative to the likeliest token; 0 keeps all.
        repetition_penalty: Divides (or multiplies negative) logits of tokens seen before; 1 is off.
        stop_ids: Any of these ends a completion and is its last token.
        stop_strings: Any of these, completed in the decoded text, ends a completion; its text is kept.
        min_tokens: Stop tokens cannot be sampled before this many tokens.
        max_tokens: Completions are cut here.
        banned_ids: Tokens that are never sampled, such as those that stand for images.
        regex: Tokens that would keep a completion from matching it cannot be sampled; None: anything goes. Log-probabilities that the
            policy computes know nothing of it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    max_tokens: int
    banned_ids: tuple[int, ...] = ()
    regex: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled answer. It keeps its index in the group from sampling to the parquet row.

    Attributes:
        index: 0..G-1 within its group.
        ids: Sampled tokens [L], the stop token included; never empty.
        logps: float32 [L], CPU: log-probability of each token under the distribution it was drawn from.
        text: The decoded tokens without special tokens.
        finish_reason: Why it ended.
        policy_version: Which weights sampled it.
    """

    index: int
    ids: tuple[int, ...]
    logps: Tensor
    text: str
    finish_reason: FinishReason
    policy_version: PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A prompt and its G completions."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What it took to give the rollout engine new weights.

    Attributes:
        version: Of the weights that it samples from now on.
        bytes: Sent; 0 for an engine that shares the trainer's memory.
    """

    version: PolicyVersion
    bytes: int


class LoggedColumn(NamedTuple):
    """A column that a reward function logged.

    Attributes:
        function: Its name.
        name: Of the column; another function may have logged one of the same name.
    """

    function: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """A group and its rewards.

    Attributes:
        group: What was scored.
        rewards: float32 [G, F], CPU. NaN: the function returned None, it did not apply.
        extras: What reward functions logged with `log_extra`, each of length G.
        failed: Names of the functions that failed on this group.
        dropped: True if `rewards.on_error: drop` took this group out of the step (its rewards are all NaN).
    """

    group: Group
    rewards: Tensor
    extras: Mapping[LoggedColumn, tuple[Any, ...]]
    dropped: bool = False
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingGroup:
    """What the optimizer needs of a scored group; small enough to keep and to save for a whole rollout window.

    Attributes:
        uid: The prompt's.
        prompt_ids: Prompt tokens.
        completion_ids: G tuples of completion tokens.
        behaviour_logps: G tensors, float32 [L].
        advantages: float32 [G].
        in_loss: G booleans; False: masked from the loss (truncated, with `mask_truncated_completions`).
        images: The prompt's, encoded.
    """

    uid: PromptId
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[tuple[int, ...], ...]
    behaviour_logps: tuple[Tensor, ...]
    advantages: Tensor
    in_loss: tuple[bool, ...]
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLogps:
    """Log-probabilities that are computed once per rollout window and kept beside its training groups.

    Those of completions that add nothing to the gradient are not computed: zeros stand in their places, and are never read.

    Attributes:
        old: G tensors, float32 [L], under the weights that sampled; None where the ratio is 1 by construction.
        reference: G tensors, float32 [L], under the reference model; None with `beta: 0`.
    """

    old: tuple[Tensor, ...] | None = None
    reference: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A prompt, with its encoded images, and completions of it that go through one forward together (all of a group, or a part of it)."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[tuple[int, ...], ...]
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """What the objective knows about the C completion tokens of a micro-batch.

    Tokens stand one after another: segment by segment, completion by completion. Which layout the forward chose
    (padded, packed, shared prefix) cannot be seen here.

    Attributes:
        sequence: int64 [C], which of the N completions a token belongs to.
        loss_mask: bool [C], False: the token takes no part in the loss.
        advantages: float [N].
        behaviour_logps: float [C], from the rollout engine.
        old_logps: float [C], under the weights that sampled; None: the current ones, detached (ratio exactly 1).
        ref_logps: float [C], under the reference; None: no KL term.
    """

    sequence: Tensor
    loss_mask: Tensor
    advantages: Tensor
    behaviour_logps: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One forward and backward: segments for the policy, tokens for the objective, in the same order.

    Attributes:
        segments: Prompts with completions.
        tokens: Their completion tokens.
        goes_on: Whether the next micro-batch has more completions of the one prompt of this one, which is to be fed once for both.
    """

    segments: tuple[Segment, ...]
    tokens: TokenBatch
    goes_on: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTotals:
    """Denominators of one optimizer step, over all its micro-batches and ranks.

    They are known before the first backward, so the objective needs neither collectives nor its neighbours.

    Attributes:
        completion_tokens: Tokens whose loss_mask is set.
        sequences: Sampled completions, masked ones included.
        local_tokens: Those of this process alone (`bnpo` normalises by its share).
        processes: Number of processes.
        entropy_threshold: With `top_entropy_quantile` below 1: tokens of lower entropy take no part in the policy term.
        entropy_tokens: Tokens at or above the threshold; equals completion_tokens without one.
        router_tokens: Prompt and completion tokens that the load-balancing losses of the micro-batches are means over.
    """

    completion_tokens: float
    sequences: float
    local_tokens: float
    processes: int = 1
    entropy_threshold: float | None = None
    entropy_tokens: float
    router_tokens: float = 0.0


class RouterStats(NamedTuple):
    """How a mixture of experts spreads the tokens of a micro-batch.

    A named tuple, as `TokenStats` is.

    Attributes:
        loss: Scalar, the load-balancing loss; differentiable unless grad is off.
        shares: float [E], which share of the tokens went to each expert.
        tokens: Tokens that both are means over, a shared prompt counted for each of its completions.
    """

    loss: Tensor
    shares: Tensor
    tokens: int


class TokenStats(NamedTuple):
    """What the policy's forward returns for the C completion tokens, in the order of `TokenBatch`.

    A named tuple: the hooks that sharding puts on a model look for tensors in tuples.

    Attributes:
        logps: float32 [C], differentiable unless grad is off.
        entropies: float32 [C]; differentiable only if the entropy bonus asks for it.
        tokens_useful: Tokens that carry information, each prompt counted as often as it was fed.
        tokens_computed: Tokens that went through the model, padding included.
        routers: Of a mixture of experts, if that was asked for.
    """

    logps: Tensor
    entropies: Tensor
    tokens_useful: int
    tokens_computed: int
    routers: RouterStats | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """The loss of a micro-batch, already divided by the step's totals: micro-batches add up.

    Attributes:
        loss: Scalar, differentiable.
        metrics: Sums and counts over this micro-batch.
    """

    loss: Tensor
    metrics: Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One optimizer step, for the recorder.

    Attributes:
        step: Optimizer steps done, this one included.
        metrics: Mergeable values by name.
        seconds: Wall time by phase: generate, score, forward_backward, optimizer, sync, and step for the whole.
    """

    step: int
    metrics: Metrics
    seconds: Mapping[str, float]
