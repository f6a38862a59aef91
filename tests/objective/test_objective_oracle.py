"""Losses, gradients, metrics and advantages against an independent implementation's numbers.

The folder comes from GRPO_ORACLE_DIR, or lies beside the project. Its README defines the fields.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from objective.objective_batches import Batch, correct, run

from grpo_cli.metrics import results
from grpo_cli.objective.advantages import (
    AdvantageSettings,
    MultiObjectiveAggregation,
    ScaleRewards,
    advantages,
    reward_metrics,
)
from grpo_cli.objective.masks import entropy_threshold
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.settings import LossType, ObjectiveSettings
from grpo_cli.types import StepTotals, TokenBatch

FOLDER = Path(os.environ.get("GRPO_ORACLE_DIR") or Path(__file__).parents[2].parent / "shared" / "oracle")
SAME_NAME = (
    "delta",
    "beta",
    "use_bias_correction_kl",
    "top_entropy_quantile",
    "entropy_coef",
    "off_policy_mask_threshold",
    "max_completion_length",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return loaded


def cases(name: str) -> list[Any]:
    """One pytest parameter per case of the file, or a skipped one without the folder."""
    if not FOLDER.is_dir():
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no oracle folder at {FOLDER}"))]
    return [pytest.param(case, id=str(number)) for number, case in enumerate(read(name)["cases"])]


def to_settings(config: dict[str, Any]) -> ObjectiveSettings:
    correction = None
    if config.get("is_mode"):
        level, mode = config["is_mode"].split("_")
        correction = correct(level, mode, config["is_clip_min"], config["is_clip_max"])
    return ObjectiveSettings(
        loss_type=LossType(config["loss_type"]),
        importance_sampling_level=RatioLevel(config["importance_sampling_level"]),
        epsilon=config["epsilon_low"],
        epsilon_high=config["epsilon_high"],
        correction=correction,
        **{name: config[name] for name in SAME_NAME if name in config},
    )


def flatten(raw: dict[str, Any], config: dict[str, Any]) -> Batch:
    """[B, T] with padding to the flat layout; padded positions stay, as masked tokens."""
    tensors = {name: torch.tensor(raw[name], dtype=torch.float64) for name in raw}
    rows, columns = tensors["mask"].shape
    tokens = TokenBatch(
        sequence=torch.arange(rows).repeat_interleave(columns),
        loss_mask=tensors["mask"].bool().flatten(),
        advantages=tensors["adv"],
        behaviour_logps=tensors["sampling"].flatten(),
        old_logps=tensors["old"].flatten() if config["with_old"] else None,
        ref_logps=tensors["ref"].flatten(),
    )
    return Batch(logps=tensors["logps"].flatten(), entropies=tensors["entropies"].flatten(), tokens=tokens)


def to_totals(batch: Batch, config: dict[str, Any]) -> StepTotals:
    """The step is this batch `gradient_accumulation_steps` times, but for its total of tokens, which the case may set."""
    repeats = config["gradient_accumulation_steps"]
    mask, quantile, threshold = batch.tokens.loss_mask, config["top_entropy_quantile"], None
    effective = mask
    if quantile < 1:
        threshold = entropy_threshold(batch.entropies, mask, quantile)
        effective = mask & (batch.entropies >= threshold)
    tokens, sequences = float(mask.sum()) * repeats, float(batch.tokens.advantages.numel()) * repeats
    return StepTotals(
        completion_tokens=config["num_items_in_batch"] or tokens,
        sequences=sequences,
        local_tokens=tokens,
        entropy_threshold=threshold,
        entropy_tokens=float(effective.sum()) * repeats,
    )


@pytest.mark.parametrize("case", cases("losses.json"))
def test_loss_gradients_and_metrics_agree_with_the_oracle(case: dict[str, Any]) -> None:
    batch = flatten(read("losses.json")["batch"], case["config"])
    outcome = run(batch, to_totals(batch, case["config"]), to_settings(case["config"]))

    assert outcome.output.loss.item() == pytest.approx(case["loss"], abs=1e-6)
    expected = torch.tensor(case["grad_logps"], dtype=torch.float64).flatten()
    torch.testing.assert_close(outcome.grad_logps, expected, atol=1e-6, rtol=0)
    expected = torch.zeros_like(expected)
    if case.get("grad_entropies") is not None:
        expected = torch.tensor(case["grad_entropies"], dtype=torch.float64).flatten()
    torch.testing.assert_close(outcome.grad_entropies, expected, atol=1e-6, rtol=0)
    ours = results(outcome.output.metrics)
    assert {name: ours[name] for name in case["metrics"]} == pytest.approx(case["metrics"], abs=1e-5)


@pytest.mark.parametrize("case", cases("advantages.json"))
def test_advantages_and_reward_metrics_agree_with_the_oracle(case: dict[str, Any]) -> None:
    config = case["config"]
    table = torch.tensor([[torch.nan if value is None else value for value in row] for row in case["rewards"]])
    groups = torch.split(table, case["num_generations"])
    settings = AdvantageSettings(
        weights=tuple(config.get("reward_weights", [1.0] * table.shape[1])),
        scale_rewards=ScaleRewards(config.get("scale_rewards", "group")),
        multi_objective_aggregation=MultiObjectiveAggregation(
            config.get("multi_objective_aggregation", "sum_then_normalize")
        ),
    )

    expected = torch.tensor(case["advantages"])
    torch.testing.assert_close(torch.cat(advantages(groups, settings)), expected, atol=1e-5, rtol=0)
    metrics = dict(case["metrics"])
    if settings.scale_rewards == "batch" or settings.multi_objective_aggregation == "normalize_then_sum":
        del metrics["frac_reward_zero_std"]  # the source takes it from the whole batch there, we always from groups
    names = [f"f{number}" for number in range(table.shape[1])]
    ours = results(reward_metrics(groups, names, settings))
    assert {name: ours[name] for name in metrics} == pytest.approx(metrics, abs=1e-5)
