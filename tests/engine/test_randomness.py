"""Random generators of devices that are no longer there."""

import pytest
import torch

from grpo_cli.engine.randomness import RandomState


def test_a_state_of_eight_devices_is_restored_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices are stood in for: what is tested is which of them are touched, and most machines have none."""
    here = RandomState.capture()
    marks = {f"cuda:{index}": torch.tensor([index], dtype=torch.uint8) for index in range(8)}
    state = RandomState(python=here.python, numpy=here.numpy, torch={"cpu": here.torch["cpu"], **marks})
    restored: dict[int, int] = {}

    def set_rng_state(value: torch.Tensor, device: int | str) -> None:
        index = torch.device(device).index if isinstance(device, str) else device
        restored[index] = int(value)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_rng_state)
    state.restore()
    assert restored == {0: 0}


def test_a_state_from_a_machine_without_devices_is_restored_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    here = RandomState.capture()
    state = RandomState(python=here.python, numpy=here.numpy, torch={"cpu": here.torch["cpu"]})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    before = torch.rand(3)
    state.restore()
    torch.testing.assert_close(torch.rand(3), before, rtol=0, atol=0)
