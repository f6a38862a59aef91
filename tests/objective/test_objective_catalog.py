"""The catalog is complete, and what an objective demands is demanded."""

from dataclasses import replace
from typing import get_args

import pytest
from objective.objective_batches import ALLOWED, correct, make_batch, make_settings, make_totals, run

from grpo_cli.objective.catalog import CATALOG, row
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.settings import LossType
from grpo_cli.recipe.schema.grpo import LossType as RecipeLossType


def test_every_loss_type_of_the_recipe_has_a_row() -> None:
    assert set(get_args(RecipeLossType)) == {str(loss_type) for loss_type in CATALOG}
    assert set(CATALOG) == set(LossType)


def test_every_objective_takes_both_levels_but_luspo() -> None:
    for loss_type, level in ALLOWED:
        row(make_settings(loss_type, level))
    with pytest.raises(ValueError, match="luspo needs importance_sampling_level sequence"):
        row(make_settings(LossType.LUSPO, RatioLevel.TOKEN))


def test_vespo_refuses_a_sequence_correction() -> None:
    row(make_settings(LossType.VESPO, correction=correct("token", "mask")))
    with pytest.raises(ValueError, match="vespo needs token level in its rollout correction"):
        row(make_settings(LossType.VESPO, correction=correct("sequence", "mask")))


def test_loss_refuses_what_the_batch_or_the_totals_lack() -> None:
    batch = make_batch([2, 3], seed=0)
    settings = make_settings(LossType.DAPO, top_entropy_quantile=0.5)
    with pytest.raises(ValueError, match=r"top_entropy_quantile is 0\.5, but the step's entropy_threshold is None"):
        run(batch, make_totals([batch], make_settings(LossType.DAPO)), settings)
    without_reference = replace(batch, tokens=replace(batch.tokens, ref_logps=None))
    settings = make_settings(LossType.DAPO, beta=0.1)
    with pytest.raises(ValueError, match=r"beta is 0\.1, but the batch has no reference"):
        run(without_reference, make_totals([batch], settings), settings)
