"""What scripts/bench/images compares is the same computation."""

import torch

from bench.image_sharing import RandomPictures, build_model, build_segment
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.types import Sampling


def test_both_ways_give_the_same_numbers() -> None:
    segment = build_segment(4, text=6, completions=3, longest=5)
    policy = PolicyModel(build_model(), sampling=Sampling(stop_ids=(0,), max_tokens=5), vision=RandomPictures(4))
    with torch.no_grad():
        apart = policy((segment,))
        policy.share_prefix()
        shared = policy((segment,))
    assert shared.tokens_computed < apart.tokens_computed
    torch.testing.assert_close(shared.logps, apart.logps, rtol=1e-4, atol=1e-4)
