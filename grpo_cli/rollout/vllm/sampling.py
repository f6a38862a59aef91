"""What vLLM is asked for: the sampling settings of this run in its words, for a server's JSON and for an engine in this process.

vLLM filters in another order than `grpo_cli.distribution`: min-p, top-k, top-p instead of top-k, top-p, min-p. Any one filter
keeps the same tokens, and so do min-p and top-k together. With min-p and top-p together its nucleus is taken of what min-p left,
is smaller, and its log-probabilities are higher; that pair is refused. Of tokens that tie with the last one in the nucleus it
keeps one or some, and this project all: in float32 such ties hardly exist.

Tokens that are banned get the lowest bias that vLLM takes, -100: what is left of their probability is below 1e-20 at any temperature it
takes, for a model that does not want them more than all others together by as many nats, and in float32 the log-probabilities of the
others are those of a distribution without them.

A stop string counts from the token after `min_tokens` on, in the local engine from that token on.
"""

from typing import Any

from grpo_cli.errors import TrainingError
from grpo_cli.recipe.vllm_rules import TEMPERATURES
from grpo_cli.rollout.sampling import sample_seed
from grpo_cli.types import Sampling

_BANNED = -100.0
"""Added to logits: the least that vLLM takes."""


def sampling_fields(sampling: Sampling, *, n: int, seed: int) -> dict[str, Any]:
    """Say how the completions of one prompt are to be drawn.

    The names are those of vLLM's `SamplingParams` and of its `/v1/completions` alike.

    Args:
        sampling: How to draw.
        n: Completions of the prompt; 1 for greedy ones, which are all the same and which vLLM refuses to draw more than once.
        seed: Of `first_seed`.

    Returns:
        Values that JSON has. The log-probability of the sampled token alone is asked for.

    Raises:
        TrainingError: If vLLM cannot draw that way.
    """
    assert n == 1 or sampling.temperature > 0.0
    _check(sampling)
    structured = {} if sampling.regex is None else {"structured_outputs": {"regex": sampling.regex}}
    banned = {"logit_bias": dict.fromkeys(sampling.banned_ids, _BANNED)} if sampling.banned_ids else {}
    return {
        **structured,
        **banned,
        "n": n,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # what ends a completion is in the set above; the model's own idea of it is often incomplete
        "stop": list(sampling.stop_strings),
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,  # stop strings are looked for in the text without them
        "logprobs": 0,
    }


def first_seed(seed_key: tuple[int | str, ...], uid: str, *, n: int) -> int:
    """Derive the seed of a prompt's first sample; vLLM adds the index for the others, and takes no more than 63 bits."""
    return sample_seed(seed_key, uid, 0) % (2**63 - n)


def _check(sampling: Sampling) -> None:
    """Refuse what vLLM would do in another way than the trainer computes it."""
    least, most = TEMPERATURES
    if sampling.temperature != 0.0 and not least <= sampling.temperature <= most:
        raise TrainingError(
            f"temperature: found {sampling.temperature:g}; vLLM samples with {least:g} to {most:g}, or greedily with 0",
            hint="leave out vllm.mode to sample with the built-in engine",
        )
    if sampling.temperature != 0.0 and sampling.top_p < 1.0 and sampling.min_p > 0.0:
        raise TrainingError(
            f"found top_p {sampling.top_p:g} with min_p {sampling.min_p:g}; vLLM takes them in the other order, which gives other "
            "probabilities than the trainer's",
            hint="use one of them, or leave out vllm.mode to sample with the built-in engine",
        )
