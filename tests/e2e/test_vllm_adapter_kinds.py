"""vLLM samples from quantized weights, magnitudes and modules that are trained whole: the canary and every step's samples say so."""

from pathlib import Path

import pytest
from e2e.experiment import records
from e2e.test_vllm_train import assert_adapters_were_sent, make, train
from optional_packages import needs_vllm
from tiny_models import build_tiny_model
from warm_start import WarmStart

pytestmark = [pytest.mark.slow, pytest.mark.e2e, needs_vllm]

TRAINED = ("model.lora.r=4", "train.learning_rate=0.05", "grpo.beta=0.01", "train.max_steps=4")

KINDS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "4 bits": (False, ("model.quantization=4bit",)),
    "8 bits, magnitudes": (True, ("model.quantization=8bit", "model.lora.use_dora=true")),
    "embedding and head": (True, ("model.lora.modules_to_save=[embed_tokens,lm_head,model.norm]",)),
}
"""Whether merged weights are sent, and what the recipe says."""


@pytest.mark.parametrize(
    ("kind", "tied"), [("4 bits", True), ("8 bits, magnitudes", False), ("embedding and head", True)]
)
def test_the_engine_samples_from_what_is_trained(kind: str, tied: bool, tmp_path: Path, warm_vllm: WarmStart) -> None:
    # With heads of a size that vLLM has kernels for.
    model = build_tiny_model(tmp_path / "model", tied=tied, hidden_size=128, initializer_range=0.2)
    merged, settings = KINDS[kind]
    experiment = make(tmp_path / "run", model, mode="colocate")
    outcome = train(experiment, *TRAINED, *settings, warm=warm_vllm)
    assert outcome.returncode == 0, outcome.stderr
    if not merged:
        assert_adapters_were_sent(experiment, steps=4)
        return
    told = records(experiment.output())
    assert len({record["sync/bytes"] for record in told}) == 1
    assert all(0 < record["sampling/logp_difference/mean"] < 1e-4 for record in told)
    assert sum("canary/logp_difference/mean" in record for record in told) >= 2
    assert told[-1]["kl"] > 0
