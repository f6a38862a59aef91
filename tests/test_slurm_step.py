"""What a task of a Slurm step becomes."""

import os
from collections.abc import Iterator

import pytest

from grpo_cli.cli.slurm_step import join_slurm_step, tasks_per_node

TOLD = {
    "SLURM_JOB_ID": "12345", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "node[1-3]", "MASTER_ADDR": "10.0.0.1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As Slurm makes it; what is added goes with the test."""
    before = dict(os.environ)
    for name, value in TOLD.items():
        monkeypatch.setenv(name, value)
    yield
    for name in os.environ.keys() - before.keys() - TOLD.keys():
        del os.environ[name]


@pytest.mark.parametrize(("text", "tasks"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])])
def test_tasks_per_node_are_expanded(text: str, tasks: list[int]) -> None:
    assert tasks_per_node(text) == tasks


def test_a_task_gets_its_place() -> None:
    join_slurm_step()
    assert {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")} == {
        "RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    }  # fmt: skip
    assert 20_000 <= int(os.environ["MASTER_PORT"]) < 40_000


@pytest.mark.parametrize(
    "changed", [{"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}], ids=["one task", "torchrun in between"]
)
def test_where_there_is_nothing_to_join_nothing_changes(
    changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    join_slurm_step()
    assert "WORLD_SIZE" not in os.environ
