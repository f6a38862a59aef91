"""The sampling settings of a run as vLLM's engine takes them. Imports vLLM: for processes where vLLM runs only."""

from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams


def engine_parameters(fields: Mapping[str, Any]) -> Any:
    """Make vLLM's sampling parameters, for answers that are read when they are complete.

    Args:
        fields: Of `sampling_fields`, perhaps as JSON gives them; others are ignored.

    Raises:
        Exception: Whatever msgspec and vLLM raise for values of wrong types or out of bounds.
    """
    own = {
        "detokenize": bool(fields["stop"]),
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY.value,
    }
    return msgspec.convert({**fields, **own}, SamplingParams, str_keys=True)
