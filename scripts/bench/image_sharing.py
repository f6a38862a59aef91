"""Measure what it saves to encode a prompt's image once for all its completions.

    scripts/bench/images                       8 completions and an image of 448 x 448, the numbers of the README: a minute or two
    scripts/bench/images --completions 16      more of them

The model is a Qwen2.5-VL of some 40 million random weights. The baseline feeds each completion with its own copy of prompt and image, in
padded rows, as `model.share_prefix: false` does. Both compute the same forward and backward, in turns, in this process.
"""

import argparse
import statistics
import time
from collections.abc import Mapping

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

from grpo_cli.policy.forward import PolicyModel
from grpo_cli.types import Sampling, Segment
from grpo_cli.vision.processor import VisionProcessor

IMAGE, START, END = 1, 2, 3
"""Tokens: of an image, and around it."""
PATCH, MERGED = 14, 2


class RandomPictures(VisionProcessor):
    """Gives pictures as the processor of Qwen2.5-VL does, of random colours; their bytes are the seed.

    Args:
        side: Patches along a side.
    """

    def __init__(self, side: int) -> None:
        super().__init__(None)
        self._side = side

    def tensors(self, images: tuple[bytes, ...]) -> Mapping[str, Tensor]:
        """See `VisionProcessor`."""
        generator = torch.Generator().manual_seed(int.from_bytes(images[0], "big"))
        grid = torch.tensor([[1, self._side, self._side]] * len(images))
        pixels = torch.randn(len(images) * self._side**2, 3 * 2 * PATCH**2, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": grid}


def build_model() -> nn.Module:
    """Make a model with the proportions of Qwen2.5-VL, and random weights."""
    text = {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    }
    vision = {
        "depth": 8,
        "hidden_size": 320,
        "intermediate_size": 856,
        "num_heads": 5,
        "out_hidden_size": 512,
        "fullatt_block_indexes": [3, 7],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForImageTextToText.from_config(config)
    return model.eval()


def build_segment(side: int, *, text: int, completions: int, longest: int) -> Segment:
    """Make a group: an image among words, and completions of half to all of the longest length."""
    numbers = torch.Generator().manual_seed(0)
    words = torch.randint(4, 8192, (text + completions * longest,), generator=numbers).tolist()
    image = (START, *[IMAGE] * (side // MERGED) ** 2, END)
    lengths = [longest - index * longest // (2 * completions) for index in range(completions)]
    return Segment(
        prompt_ids=(*words[: text // 2], *image, *words[text // 2 : text]),
        completion_ids=tuple(tuple(words[text + index * longest :][:length]) for index, length in enumerate(lengths)),
        images=((1).to_bytes(1, "big"),),
    )


def seconds(policy: PolicyModel, segment: Segment) -> float:
    """Time a forward and backward, in seconds of the processor."""
    began = time.process_time()
    policy((segment,)).logps.sum().backward()
    policy.zero_grad()
    return time.process_time() - began


def main() -> None:
    """Measure both ways in turns, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=448, help="of a side; 28 are one token")
    parser.add_argument("--text", type=int, default=64, help="prompt tokens beside the image")
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest completion")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    side = arguments.pixels // (PATCH * MERGED) * MERGED
    segment = build_segment(side, text=arguments.text, completions=arguments.completions, longest=arguments.longest)
    policy = PolicyModel(
        build_model(), sampling=Sampling(stop_ids=(0,), max_tokens=arguments.longest), vision=RandomPictures(side)
    )
    encoded: list[int] = []
    policy.model.model.visual.patch_embed.register_forward_hook(lambda _module, _inputs, out: encoded.append(len(out)))
    found: dict[str, list[float]] = {"padded rows": [], "shared": []}
    patches: dict[str, int] = {}
    for turn in range(arguments.turns + 1):
        for way, times in found.items():
            policy.share_prefix() if way == "shared" else policy.feed_prompts_apart()
            taken = seconds(policy, segment)
            patches[way] = encoded[-1]
            if turn:  # the first only warms up
                times.append(taken)
    table = Table("", "patches encoded", "forward + backward, s of the processor", "times less")
    base = statistics.median(found["padded rows"])
    for way, times in found.items():
        middle = statistics.median(times)
        table.add_row(way, f"{patches[way]:,}", f"{middle:.2f}", f"{base / middle:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
