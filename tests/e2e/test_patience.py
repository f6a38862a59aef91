"""How long processes wait for each other: as long as a reward takes."""

from pathlib import Path

import pytest
from e2e.experiment import Experiment, make_experiment
from many_processes import train_in_forked
from warm_start import WarmStart

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Experiment:
    return make_experiment(
        tmp_path_factory.mktemp("experiment"),
        tiny_model_folder,
        generation={"max_completion_length": 10},
        train={"prompts_per_step": 3, "max_steps": 1},
    )


SHORT_PATIENCE = """
from datetime import timedelta
import torch.distributed
torch.distributed.distributed_c10d.default_pg_timeout = timedelta(seconds=4)
"""
WAS_SHORT = """
group = torch.distributed.distributed_c10d._get_default_group()
assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=4)
"""


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_zero3", "fsdp2"])
def test_a_reward_that_takes_longer_than_collectives_may_trips_none(
    experiment: Experiment, warm: WarmStart, strategy: str
) -> None:
    """With what is 10 or 30 minutes cut down to seconds; the other process waits meanwhile."""
    (experiment.folder / "patient_rewards.py").write_text(
        "import time\n\n\ndef patient(completions, **_):\n    time.sleep(6)\n    return [float(len(one)) for one in completions]\n"
    )
    more = {
        "train.output_dir": experiment.output(f"patient-{strategy}"),
        "train.max_steps": 1,
        "distributed.strategy": strategy,
        "rewards.reward_funcs": "[patient_rewards.patient]",
    }
    train_in_forked(warm, 2, [(experiment.recipe, more, None)], before=SHORT_PATIENCE, afterwards=WAS_SHORT)
