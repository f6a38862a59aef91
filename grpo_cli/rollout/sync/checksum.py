"""A checksum of streamed weights that costs little more than to copy them, on the device where they are."""

import hashlib
import json
from functools import cache

import torch
from torch import Tensor

from grpo_cli.rollout.sync.buckets import Bucket, slots_to_json

_ROW_WORDS = 16384
"""A row, its factors and their products stay in a core's cache."""

_GPU_ROWS_AT_ONCE = 1024
"""A GPU wants more work at once; 128 MiB for the products are little there."""


class Checksum:
    """Tells whether two sides saw the same tensors: the same names, dtypes, shapes and bits, in the same order.

    The bytes of a tensor, filled up with zeros, are 32-bit words w_i in rows of 16384. The digest of a row is the sum of
    k_i w_i modulo 2^64 with fixed random k_i: if one word differs or two change places, it differs except with a probability
    of about 2^-32. The digests and the description of each tensor then go through BLAKE2b, in order. Buckets leave no trace,
    so the value does not depend on their size. It is not meant to withstand someone who looks for a collision.
    """

    def __init__(self) -> None:
        self._chain = hashlib.blake2b(digest_size=16)

    def add(self, bucket: Bucket) -> None:
        """Go on with the tensors of the next bucket."""
        digests, start = [], 0
        for slot in bucket.slots:
            digests.append(_row_digests(bucket.data[start : start + slot.place_bytes]))
            start += slot.place_bytes
        values = torch.cat(digests).cpu()  # once a bucket: each such copy waits for the GPU
        described = slots_to_json(bucket.slots)
        parts = torch.split(values, [len(rows) for rows in digests])
        for description, part in zip(described, parts, strict=True):
            self._chain.update(json.dumps(description).encode())
            self._chain.update(part.numpy().tobytes())

    @property
    def value(self) -> str:
        """32 hexadecimal digits for all that was added."""
        return self._chain.hexdigest()


@cache
def _factors(device: torch.device) -> Tensor:
    """Give int64 [16384] that are the same on every machine; torch's generators promise that for one version of torch only."""
    drawn = bytearray(hashlib.shake_128(b"grpo weights").digest(8 * _ROW_WORDS))
    return torch.frombuffer(drawn, dtype=torch.int64).to(device)


def _row_digests(data: Tensor) -> Tensor:
    """Sum up bytes [n], n a multiple of 4, to int64 [rows]; the last row may be shorter."""
    words = data.view(torch.int32)
    factors = _factors(data.device)
    rows_at_once = 1 if data.device.type == "cpu" else _GPU_ROWS_AT_ONCE
    whole = len(words) // _ROW_WORDS * _ROW_WORDS
    rows = words[:whole].view(-1, _ROW_WORDS)
    digests = [(part * factors).sum(dim=1) for part in torch.split(rows, rows_at_once)] if whole else []
    rest = words[whole:]
    digests.append((rest * factors[: len(rest)]).sum().view(1))
    return torch.cat(digests)
