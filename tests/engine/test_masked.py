"""Which completions the rollout correction masks, against a product computed by hand; and what recipes say of it."""

import math
from dataclasses import replace

import pytest
import torch
from engine.conftest import GroupMaker

from grpo_cli.engine.masked import masked_completions
from grpo_cli.engine.settings import correction_settings
from grpo_cli.metrics import Mean
from grpo_cli.objective.correction import CorrectionMode, CorrectionSettings
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.recipe.schema import VllmSection
from grpo_cli.types import TrainingGroup


def drifted(group: TrainingGroup, drifts: list[float]) -> list[tuple[torch.Tensor, ...]]:
    """Old log-probabilities that lie `drifts` above those of the rollout engine, one number a completion."""
    return [tuple(logps + drift for logps, drift in zip(group.behaviour_logps, drifts, strict=True))]


@pytest.mark.parametrize(("level", "masked"), [(RatioLevel.SEQUENCE, [20, 3]), (RatioLevel.TOKEN, [3])])
def test_a_product_leaves_the_bounds_where_its_factors_do_not(
    level: RatioLevel, masked: list[int], make_group: GroupMaker
) -> None:
    group, drifts = make_group(2, 20, 5, 3), [0.1, 0.1, -0.1, 2.0]
    settings = CorrectionSettings(level=level, mode=CorrectionMode.MASK, clip_min=0.4, clip_max=3.0)
    found = masked_completions([group], {0: range(4)}, drifted(group, drifts), settings)
    inside = {length: 0.4 <= math.exp(length * drift) <= 3 for length, drift in zip((2, 20, 5, 3), drifts, strict=True)}
    if level == RatioLevel.SEQUENCE:
        assert masked == [length for length, kept in inside.items() if not kept]
    assert found.lengths == Mean(sum(masked), len(masked))
    assert found.lengths.merge(found.other_lengths) == Mean(2 + 3 + 5 + 20, 4)


def test_what_was_not_computed_or_is_not_in_the_loss_does_not_count(make_group: GroupMaker) -> None:
    group = make_group(2, 3, 4, in_loss=(True, False, True))
    settings = CorrectionSettings(level=RatioLevel.TOKEN, mode=CorrectionMode.MASK)
    found = masked_completions([group], {0: [0, 1]}, drifted(group, [5.0, 5.0, 5.0]), settings)
    assert (found.lengths, found.other_lengths) == (Mean(2, 1), Mean(0, 0))


def test_a_completion_of_unknown_probabilities_is_not_masked(make_group: GroupMaker) -> None:
    group = make_group(3)
    group = replace(group, behaviour_logps=(torch.full((3,), math.nan),))
    settings = CorrectionSettings(level=RatioLevel.SEQUENCE, mode=CorrectionMode.MASK)
    assert masked_completions([group], {0: [0]}, drifted(group, [5.0]), settings).lengths == Mean(0, 0)


@pytest.mark.parametrize(
    ("mode", "level", "action"),
    [
        ("token_truncate", RatioLevel.TOKEN, CorrectionMode.TRUNCATE),
        ("token_mask", RatioLevel.TOKEN, CorrectionMode.MASK),
        ("sequence_truncate", RatioLevel.SEQUENCE, CorrectionMode.TRUNCATE),
        ("sequence_mask", RatioLevel.SEQUENCE, CorrectionMode.MASK),
    ],
)
def test_the_recipe_says_how_ratios_are_bounded(mode: str, level: RatioLevel, action: CorrectionMode) -> None:
    section = VllmSection(mode="server", importance_sampling_mode=mode, importance_sampling_clip_min=0.5)  # type: ignore[arg-type]
    assert correction_settings(section) == CorrectionSettings(level=level, mode=action, clip_min=0.5, clip_max=3.0)


def test_the_built_in_engine_is_not_corrected_and_vllm_need_not_be() -> None:
    assert correction_settings(VllmSection()) is None
    assert correction_settings(VllmSection(mode="colocate", importance_sampling_correction=False)) is None
