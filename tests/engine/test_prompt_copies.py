"""What attention with masks holds on top, against what autograd really keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from padded_calls import SAMPLING, load
from tiny_models import build_tiny_model

from grpo_cli.engine.activations import Precision
from grpo_cli.engine.prompt_copies import copied_bytes
from grpo_cli.policy.checkpointing import Checkpointing, set_checkpointing
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.types import Segment

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"longest": 32, "device": CPU, "checkpointing": False, "precision": "float32"}


def kept_bytes(policy: PolicyModel, segments: tuple[Segment, ...]) -> int:
    """Bytes that a forward keeps for its backward, parameters left out."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(segments)
    for parameter in policy.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(("prompt", "group", "completion"), [(100, 4, 20), (20, 4, 50), (200, 8, 10)])
def test_copies_are_counted_as_autograd_keeps_them(prompt: int, group: int, completion: int, tmp_path: Path) -> None:
    policy = PolicyModel(load(build_tiny_model(tmp_path, num_layers=4)), sampling=SAMPLING)
    policy.share_prefix()
    ids = tuple(range(5, 5 + completion))
    segments = (Segment(prompt_ids=tuple(range(5, 5 + prompt)), completion_ids=(ids,) * group),)
    in_blocks = kept_bytes(policy, segments)
    counted: dict[str, Any] = {**SETTINGS, "read_keys": group * (prompt + completion)}
    tokens = prompt + group * completion
    assert copied_bytes(policy, tokens, **counted) == 0

    policy.attends_in_blocks = False
    measured = kept_bytes(policy, segments) - in_blocks
    of_all, of_one = (
        copied_bytes(policy, tokens, **{**counted, "checkpointing": checkpointing}) for checkpointing in (False, True)
    )
    # All layers' copies, and the gradients of one layer's, which are as large.
    assert of_all - of_one // 2 == pytest.approx(measured, rel=0.2)
    assert of_one == pytest.approx(2 * measured / 4, rel=0.2)


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_what_is_computed_again_is_kept_of_no_layer(checkpointing: Checkpointing, tmp_path: Path) -> None:
    model = load(build_tiny_model(tmp_path, num_layers=4))
    set_checkpointing(model, checkpointing)
    policy = PolicyModel(model, sampling=SAMPLING)
    policy.share_prefix()
    segments = (Segment(prompt_ids=tuple(range(5, 205)), completion_ids=((5, 6, 7, 8),) * 8),)
    in_blocks = kept_bytes(policy, segments)
    policy.attends_in_blocks = False
    assert kept_bytes(policy, segments) <= 1.05 * in_blocks


@pytest.mark.parametrize(
    ("precision", "kernel", "copies"),
    [("float32", True, True), ("autocast", True, False), ("bfloat16", True, False), ("bfloat16", False, True)],
)
def test_on_a_gpu_copies_are_counted_where_its_kernel_is_not_used(
    precision: Precision, *, kernel: bool, copies: bool, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("grpo_cli.engine.prompt_copies.has_kernel", lambda _device: kernel)
    policy = PolicyModel(load(tiny_model_folder), sampling=SAMPLING)
    settings: dict[str, Any] = {**SETTINGS, "device": torch.device("cuda", 0), "precision": precision}
    assert (copied_bytes(policy, 100, read_keys=300, **settings) > 0) is copies
    assert copied_bytes(policy, 100, read_keys=0, **settings) == 0


def test_windows_count_where_sequences_are_longer(tmp_path: Path) -> None:
    policy = PolicyModel(load(build_tiny_model(tmp_path, "mistral", sliding_window=16)), sampling=SAMPLING)
    copies = [
        copied_bytes(policy, 100, read_keys=300, **{**SETTINGS, "longest": longest}) for longest in (16, 17, None)
    ]
    assert copies[0] == 0
    assert copies[1] == copies[2] > 0
