"""One forward for old, reference and current log-probabilities: segments in, `TokenStats` out.

How segments are laid out for the model is this stage's own business (see `layout`); the objective sees completion tokens one
after another, whatever the layout.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_cli.errors import ModelError
from grpo_cli.policy import shared_prefix
from grpo_cli.policy.adapters import output_head
from grpo_cli.policy.head import LogitScaling, statistics_of_logits, token_statistics
from grpo_cli.policy.images import SegmentImages, nothing_seen
from grpo_cli.policy.layout import Layout, SharedPrefix, completions_row, packed_row, padded_rows
from grpo_cli.policy.router import expert_shares as shares_of_experts
from grpo_cli.policy.router import load_balancing_loss
from grpo_cli.policy.shared_prefix import PackedRow
from grpo_cli.policy.split_prompt import SplitPrompt
from grpo_cli.types import RouterStats, Sampling, Segment, TokenStats
from grpo_cli.vision.inputs import image_runs, sees_images_both_ways
from grpo_cli.vision.processor import VisionProcessor


def has_windows(config: Any, longest: int | None = None) -> bool:
    """Tell whether some layer of a model attends to a part of what is before only; a short probe could not show it.

    Args:
        config: Of the text model.
        longest: Tokens of the longest sequence there will be: a window of that many hides nothing. None: not known.
    """
    reaches = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if longest is None or not layers <= reaches.keys():
        return bool(layers or any(reaches.values()))
    used = [reach for layer, reach in reaches.items() if reach or layer in layers]
    return not all(isinstance(reach, int) and reach >= longest for reach in used)


class PolicyModel(nn.Module):
    """A causal language model whose forward gives token statistics.

    It is this module that distributed wrappers wrap, so that their hooks see one forward with everything in it.

    Args:
        model: A transformers causal or vision-language model, possibly with adapters.
        sampling: The distribution that completions are drawn from in training.
        vision: Makes tensors of the images of segments; None: there are none.

    Attributes:
        shares_prefix: Whether a prompt is fed once for all its completions, in a packed row without padding.
        full_logits: Whether the model's own logits are taken at every position instead of applying the head to completion
            positions only: slower, for models whose head does more than `LogitScaling` knows.
        always_sees: Whether an image is encoded in every forward, also where no segment has one: processes that hold parts of the
            weights go through them together.
        splits_prompts: Whether a prompt may be fed once for parts of its group too, as a `SplitPrompt`, where it is fed once.
        attends_in_blocks: Whether a packed row is attended to block by block, where the device has a kernel for that; if not, with
            masks.
    """

    def __init__(self, model: Any, *, sampling: Sampling, vision: VisionProcessor | None = None) -> None:
        super().__init__()
        self.model = model
        self.sampling = sampling
        self.vision = vision
        self.shares_prefix = False
        self.full_logits = False
        self.splits_prompts = True
        self.attends_in_blocks = True
        self.always_sees = False
        self.scaling = LogitScaling.of(model.config.get_text_config())

    def share_prefix(self, longest: int | None = None) -> None:
        """Feed prompts once. The model must attend through transformers' interface, to everything before or through a window.

        Args:
            longest: Tokens of the longest sequence there will be, prompt and completion; None: not known.

        Raises:
            ValueError: If it does not.
        """
        implementation = self.model.config._attn_implementation  # noqa: SLF001  there is no public name
        config = self.model.config.get_text_config()
        if getattr(self.model, "_is_stateful", False):
            raise ValueError("its layers carry a recurrent state")
        if implementation not in {*shared_prefix.NAMES, *shared_prefix.NAMES.values()}:
            raise ValueError(f"its attention is {implementation}")
        if has_windows(config, longest) and config.model_type not in shared_prefix.WINDOWED_FAMILIES:
            raise ValueError("its layers do not all attend to everything before")
        self.model.set_attn_implementation(shared_prefix.NAMES.get(implementation, implementation))
        self.shares_prefix = True

    def feed_prompts_apart(self) -> None:
        """Undo `share_prefix`."""
        present = self.model.config._attn_implementation  # noqa: SLF001
        plain = {name: implementation for implementation, name in shared_prefix.NAMES.items()}
        self.model.set_attn_implementation(plain.get(present, present))
        self.shares_prefix = False

    def forward(
        self,
        segments: tuple[Segment, ...],
        *,
        entropy_grad: bool = False,
        routers: bool = False,
        expert_shares: Tensor | None = None,
        prompt: SplitPrompt | None = None,
    ) -> TokenStats:
        """Compute log-probability and entropy of every completion token.

        Args:
            segments: Prompts with completions; at least one completion in all.
            entropy_grad: Whether the entropies are differentiable.
            routers: Whether to compute the load-balancing loss of a mixture of experts; not for a part of a group.
            expert_shares: float [E], the shares that this loss is to be computed with; None: those of these segments.
            prompt: The prompt of the one segment, which is a part of a group: it goes through the model with the first part only.
                Needs `shares_prefix`.

        Returns:
            Statistics in the order of the segments' completion tokens.
        """
        if prompt is not None:
            assert not routers
            return self._part_of_a_group(segments, prompt, entropy_grad=entropy_grad)
        layout = (packed_row if self.shares_prefix else padded_rows)(segments)
        # Counted before the layout moves: asking a device would wait for it.
        useful = int(layout.multiplicity.count_nonzero())
        in_sequences = int(layout.multiplicity.sum())
        images = self._images(segments)
        if images is not None and layout.prefixes:
            layout = images.placed(layout)
        layout = layout.to(self._device)
        packed = self._row(self._prefixes(layout, segments)) if layout.prefixes else None
        common = self._common(layout, entropy_grad=entropy_grad)
        inputs = _inputs(layout, packed) | ({"output_router_logits": True} if routers else {})
        if images is not None:
            inputs |= images.padded(layout) if packed is None else images.packed()
        nothing = self._nothing() if images is None and self.always_sees else None
        if self.full_logits:
            outputs = self.model(**inputs)
            logits = _added(outputs.logits[layout.row, layout.column].float(), nothing)
            logps, entropies = statistics_of_logits(logits, **common)
        else:
            outputs = self._body(images)(**inputs)
            hidden = _added(outputs.last_hidden_state[layout.row, layout.column], nothing)
            logps, entropies = token_statistics(hidden, head=self._head, scaling=self.scaling, **common)
        found = None
        if routers:
            found = self._routers(outputs.router_logits, layout.multiplicity.flatten(), expert_shares, in_sequences)
        return TokenStats(
            logps=logps.float(),
            entropies=entropies.float(),
            tokens_useful=useful,
            tokens_computed=layout.ids.numel(),
            routers=found,
        )

    def _part_of_a_group(self, segments: tuple[Segment, ...], prompt: SplitPrompt, *, entropy_grad: bool) -> TokenStats:
        """Compute the statistics of completions whose prompt is, or will have been, computed by itself."""
        assert self.shares_prefix
        (segment,) = segments
        assert segment.prompt_ids == prompt.ids
        images = self._images(segments)
        fed = 0
        if not prompt.is_computed:
            alone = (replace(segment, completion_ids=((0,),)),)
            layout = packed_row(alone)
            fed = layout.ids.numel()
            seen: dict[str, Any] = {}
            if images is not None:
                own = replace(images, segments=alone)
                layout, seen = own.placed(layout), own.packed()
            layout = layout.to(self._device)
            inputs = _inputs(layout, self._row(self._prefixes(layout, alone), records=prompt)) | seen
            prompt.close(self._body(images)(**inputs).last_hidden_state[0, -1:])
        layout = completions_row(segment)
        fed += layout.ids.numel()
        if images is not None:
            layout = images.placed(layout, continues=True)
        layout = layout.to(self._device)
        states = prompt.last_hidden
        if layout.ids.numel():
            inputs = _inputs(layout, self._row(layout.prefixes, continues=prompt))
            hidden = self._body(None)(**inputs).last_hidden_state[0]
            states = torch.cat([hidden, states])  # so that place -1 is the prompt's last state
        logps, entropies = token_statistics(
            states[layout.column],
            head=self._head,
            scaling=self.scaling,
            **self._common(layout, entropy_grad=entropy_grad),
        )
        return TokenStats(logps=logps.float(), entropies=entropies.float(), tokens_useful=fed, tokens_computed=fed)

    def _routers(
        self, router_logits: tuple[Tensor, ...], multiplicity: Tensor, shares: Tensor | None, tokens: int
    ) -> RouterStats:
        """Compute how the tokens of a layout are spread over experts."""
        if not router_logits:
            raise ModelError(
                f"grpo.router_aux_loss_coef: {type(self.model).__name__} gives no router logits", hint="set it to 0"
            )
        chosen: int = self.model.config.get_text_config().num_experts_per_tok
        own = shares_of_experts(router_logits, multiplicity, experts_per_token=chosen)
        balance = load_balancing_loss(router_logits, multiplicity, shares=own if shares is None else shares)
        return RouterStats(loss=balance, shares=own, tokens=tokens)

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def _head(self) -> nn.Module:
        return output_head(self.model)

    def _body(self, images: SegmentImages | None) -> Any:
        """Give what computes hidden states: the text model alone where there are no images.

        DeepSpeed brings weights together in the order in which modules were called before, so that all processes have to call the same.
        """
        return self.model.model if images is not None or self.always_sees else self.model.get_decoder()

    def _images(self, segments: tuple[Segment, ...]) -> SegmentImages | None:
        """Give the images of segments; None: they have none."""
        if not any(segment.images for segment in segments):
            return None
        assert self.vision is not None, "prompts have images only where the model has a processor for them"
        return SegmentImages(model=self.model, segments=segments, vision=self.vision)

    def _nothing(self) -> Tensor:
        """Go through the weights that see: a 0 []."""
        assert self.vision is not None
        return nothing_seen(self.model, self.vision)

    def _row(self, prefixes: tuple[SharedPrefix, ...], **prompt: SplitPrompt) -> PackedRow:
        return PackedRow(prefixes, self._device, in_blocks=self.attends_in_blocks, **prompt)

    def _prefixes(self, layout: Layout, segments: tuple[Segment, ...]) -> tuple[SharedPrefix, ...]:
        """Give the prompts of a packed row, with their images where these see more than what is before."""
        if not any(segment.images for segment in segments) or not sees_images_both_ways(self.model):
            return layout.prefixes
        config = self.model.config
        return tuple(
            replace(prefix, images=image_runs(config, segment.prompt_ids) if segment.images else ())
            for prefix, segment in zip(layout.prefixes, segments, strict=True)
        )

    def _common(self, layout: Layout, *, entropy_grad: bool) -> dict[str, Any]:
        """What every way of computing statistics takes."""
        return {
            "targets": layout.targets,
            "positions": layout.target_positions,
            "sampling": self.sampling,
            "entropy_grad": entropy_grad,
        }


def _added(states: Tensor, nothing: Tensor | None) -> Tensor:
    return states if nothing is None else states + nothing


def _inputs(layout: Layout, packed: PackedRow | None) -> dict[str, Any]:
    """Give what the model is called with."""
    if packed is None:
        mask = (layout.multiplicity > 0).long()
        return {"input_ids": layout.ids, "attention_mask": mask, "use_cache": False}
    return {
        "input_ids": layout.ids,
        # A mask of four dimensions is taken as finished: the model builds none, and the attention function needs none.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=layout.ids.device),
        "position_ids": layout.positions,
        "packed": packed,
        "use_cache": False,
    }
