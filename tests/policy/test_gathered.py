"""The attention that a GPU takes, forced on the CPU: every family, whole and in parts, against the model's own padded call."""

from pathlib import Path

import pytest
import torch
from dispatched import Dispatched
from padded_calls import COMPLETIONS, GROUP, PROMPT, SAMPLING, Way, assert_same_as_padded_call, in_parts, load, whole
from tiny_models import FAMILIES, build_tiny_model

from grpo_cli.policy import shared_prefix
from grpo_cli.policy.forward import PolicyModel


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "_attends_in_blocks", lambda *_states: False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [whole, in_parts])
def test_groups_gathered_into_rectangles_give_the_statistics_and_gradients_of_the_padded_call(
    family: str, way: Way, tmp_path: Path
) -> None:
    assert_same_as_padded_call(load(build_tiny_model(tmp_path, family)), way, (GROUP,), "selective")


def test_no_layer_asks_the_device_for_a_number_or_masks_a_plain_prompt(tmp_path: Path) -> None:
    """A boolean index waits for the device in every layer, since its outcome has a size that only the device knows."""
    policy = PolicyModel(load(build_tiny_model(tmp_path, num_layers=3)), sampling=SAMPLING)
    policy.share_prefix()
    with Dispatched() as seen:
        whole(policy, torch.ones(sum(map(len, COMPLETIONS))))
    assert len(seen.named("nonzero")) == 1  # where the rectangle is laid out, on the host
    indices = [index for call in seen.named("index", "index_put", "_index_put_impl_") for index in call[1]]
    assert not [index for index in indices if index is not None and index.dtype == torch.bool]
    attended = seen.named("_scaled_dot_product_flash_attention_for_cpu")
    longest = max(map(len, COMPLETIONS)) - 1
    assert [states[0].shape[2] for states in attended] == [len(PROMPT), longest] * 3
    assert all(is_causal for *_, is_causal in attended[::2])
