"""The sampling settings of a run as vLLM's engine takes them. Imports vLLM: for processes where vLLM runs only."""

from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams

_FIELDS = frozenset(
    {
        *("n", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
        *("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"),
        *("stop", "include_stop_str_in_output", "skip_special_tokens"),
    }
)
_LEAST_SEED, _MOST_SEED = -(2**63), 2**63 - 1


def engine_parameters(fields: Mapping[str, Any]) -> Any:
    """Make vLLM's sampling parameters, for answers that are read when they are complete.

    Args:
        fields: Of `sampling_fields`, perhaps as JSON gives them; others are ignored, of which vLLM has some that it trusts without a look.

    Raises:
        Exception: Whatever msgspec and vLLM raise for values of wrong types or out of bounds.
    """
    known = {name: value for name, value in fields.items() if name in _FIELDS}
    if structured := fields.get("structured_outputs"):
        known["structured_outputs"] = {"regex": structured["regex"]}
    own = {
        "logprobs": 0,
        "detokenize": bool(fields.get("stop")),
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY.value,
    }
    parameters = msgspec.convert({**known, **own}, SamplingParams, str_keys=True)
    if parameters.seed is not None and not _LEAST_SEED <= parameters.seed <= _MOST_SEED:
        raise ValueError(f"seed: found {parameters.seed}; allowed: what has 64 bits with its sign")
    return parameters
