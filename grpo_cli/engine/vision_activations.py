"""What the backward of a vision tower keeps in memory, by its configuration: counted from the operations of its layers, and measured.

A tower cuts an image into patches; so many of them become one token of the text model (`patches_per_token`). Per patch and layer, with the
hidden size h and the intermediate size i, a layer keeps 11 h + 2 i numbers:

- Each of the two norms keeps its input, and what reads its outcome keeps that: 4 h.
- Attention keeps queries, keys and values together, the first two again after their rotation, and what comes out of it: 7 h, with what joins
  or scales the outcomes.
- The MLP keeps what goes into its activation and what comes out: 2 i, or 3 i where the activation is made of two operations.

With gated MLPs and norms of squares alone (Qwen2.5-VL) it is 13 h + 4 i (see `activations`). Pixels, the embedding of patches and what
brings them into the text model keep about 6 h of each patch, and 3 h more for each layer that the text model is given besides the last.

What autograd saved in towers of eight families was from 2 % more to a fifth less; families without rotations keep least. A tower that is
frozen, and has no adapters, keeps nothing, for nobody asks for a gradient there.
"""

from dataclasses import dataclass
from typing import Any

from grpo_cli.engine.activations import Precision
from grpo_cli.policy.checkpointing import Checkpointing
from grpo_cli.policy.parts import VISION_TOWER, parameters_of
from grpo_cli.rollout.cached_values import positive_integer

_NORM_BYTES: dict[Precision, int] = {"float32": 16, "bfloat16": 8, "autocast": 12}
"""Per hidden unit, of both norms, and what is read of their outcome: inputs are float32 in autocast, outcomes rounded."""
_GATED_NORM_BYTES: dict[Precision, int] = {"float32": 24, "bfloat16": 16, "autocast": 24}
"""The same of norms of squares, which keep what they have normalised, too, in float32."""

_AROUND, _AROUND_A_LAYER = 6, 3
"""Numbers per hidden unit of a patch, outside of the layers; and for each layer besides the last that the text model is given."""

_INSIDE = {"silu": 4, "quick_gelu": 3}
"""Numbers per unit of the MLP; 2 with others. `silu` multiplies two products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerSizes:
    """Numbers of a vision tower.

    Attributes:
        layers: How many there are.
        hidden: Width between the layers.
        intermediate: Width inside the MLP.
        inside: Numbers that the MLP keeps per unit of its width.
        given: Layers besides the last whose outcomes go to the text model.
        patches_per_token: Patches that become a token of the text model.
    """

    layers: int
    hidden: int
    intermediate: int
    inside: int
    given: int
    patches_per_token: int

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two products; then norms are of squares."""
        return self.inside == _INSIDE["silu"]

    @classmethod
    def of(cls, config: Any) -> "TowerSizes | None":
        """Read the configuration of a vision-language model; None if it does not say."""
        tower = getattr(config, "vision_config", None)
        layers = positive_integer(tower, "num_hidden_layers") or positive_integer(tower, "depth")
        # Qwen2-VL calls the width of the text model `hidden_size` there.
        hidden = positive_integer(tower, "embed_dim") or positive_integer(tower, "hidden_size")
        if layers is None or hidden is None:
            return None
        return cls(
            layers=layers,
            hidden=hidden,
            intermediate=positive_integer(tower, "intermediate_size")
            or int(getattr(tower, "mlp_ratio", None) or 4) * hidden,
            inside=_INSIDE.get(getattr(tower, "hidden_act", ""), 2),
            given=len(getattr(tower, "deepstack_visual_indexes", ())),
            patches_per_token=_patches_per_token(config, tower),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerBytes:
    """What the images of a micro-batch take.

    Attributes:
        kept: Bytes from the forward to the tower's backward, which is the last.
        again: Bytes that its backward takes on top, for the layer that it is in. The text model's are gone by then.
    """

    kept: int
    again: int


NO_IMAGES = TowerBytes(kept=0, again=0)


def tower_bytes(model: Any, image_tokens: int, *, checkpointing: Checkpointing, precision: Precision) -> TowerBytes:
    """Count what is held of the images of a micro-batch.

    Args:
        model: A transformers model, which needs no weights.
        image_tokens: Tokens of the text model that stand for parts of images.
        checkpointing: What the model really does.
        precision: What it computes in.

    Returns:
        Nothing where nothing in the tower is trained, or its configuration does not say.
    """
    tower = TowerSizes.of(model.config)
    if not image_tokens or tower is None or not is_trained(model):
        return NO_IMAGES
    size = 4 if precision == "float32" else 2
    between = 2 if precision == "bfloat16" else 4
    whole = _whole_layer(tower, precision)
    match checkpointing:
        case True:
            layer = between * tower.hidden
        case False:
            layer = whole
        case "selective":  # the layer's input, and products but the last: queries, keys, values, attention twice, one or two of the MLP
            layer = between * tower.hidden + size * (5 * tower.hidden + (2 if tower.gated else 1) * tower.intermediate)
    patches = image_tokens * tower.patches_per_token
    of_gradients = size * (2 * tower.intermediate + 2 * tower.hidden)
    return TowerBytes(
        kept=patches * (tower.layers * layer + (_AROUND + _AROUND_A_LAYER * tower.given) * size * tower.hidden),
        again=patches * (of_gradients + (0 if checkpointing is False else whole)),
    )


def is_trained(model: Any) -> bool:
    """Tell whether anything in a model's vision tower takes a gradient."""
    return any(one.requires_grad for one in parameters_of(model, VISION_TOWER).values())


def _whole_layer(tower: TowerSizes, precision: Precision) -> int:
    """Bytes that a layer keeps of a patch without checkpointing."""
    size = 4 if precision == "float32" else 2
    norms = (_GATED_NORM_BYTES if tower.gated else _NORM_BYTES)[precision]
    return norms * tower.hidden + size * (7 * tower.hidden + tower.inside * tower.intermediate)


def _patches_per_token(config: Any, tower: Any) -> int:
    """Tell how many patches become one token: families call it by the side of a square, by its inverse, or by the two numbers."""
    side = positive_integer(tower, "spatial_merge_size") or positive_integer(config, "scale_factor")
    if side is not None:
        return side**2
    ratio = getattr(config, "downsample_ratio", None)
    if isinstance(ratio, float) and 0 < ratio < 1:
        return round(ratio**-2)
    tokens, pixels = positive_integer(config, "mm_tokens_per_image"), positive_integer(tower, "image_size")
    patch = positive_integer(tower, "patch_size")
    return 1 if tokens is None or pixels is None or patch is None else max(1, (pixels // patch) ** 2 // tokens)
