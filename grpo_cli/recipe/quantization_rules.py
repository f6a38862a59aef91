"""Rules across the keys of `model:` about quantized weights."""

from collections.abc import Callable, Iterable

from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.idle_settings import idle
from grpo_cli.recipe.schema import Recipe

_OF_4BIT = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")


def quantized_weights_are_frozen(recipe: Recipe) -> Iterable[Finding]:
    """A step is smaller than the distance of two levels, so only adapters beside quantized weights can be trained."""
    quantization = recipe.model.quantization
    if quantization is not None and recipe.model.lora is None:
        yield Finding(
            keys=("model.quantization", "model.lora"),
            message=f"found {quantization} without model.lora; allowed: with it, because weights in so few bits cannot be trained themselves",
            hint="add `model.lora: {}`, or leave the key out",
        )


def quantized_weights_are_whole(recipe: Recipe) -> Iterable[Finding]:
    """What cuts weights into parts knows floats only.

    Tried with two processes: transformers refuses to load for ZeRO-3 what it is to round ("not compatible with passing a `device_map`").
    With fsdp2 the other processes make a model without weights to take their parts; there 8-bit layers cannot be made, and 4-bit ones
    are not rounded, so that the first process sends less than the others wait for. ZeRO-1 and 2 leave weights whole.
    """
    strategy = recipe.distributed.strategy
    if recipe.model.quantization is not None and strategy in ("deepspeed_zero3", "fsdp2"):
        yield Finding(
            keys=("distributed.strategy", "model.quantization"),
            message=f"found {strategy} with model.quantization: {recipe.model.quantization}; allowed: auto, ddp, deepspeed_zero1, "
            "deepspeed_zero2, because quantized weights are not cut into parts",
            hint="quantized weights are small: with ddp each process has all of them",
        )


def rounding_reads_its_settings(recipe: Recipe) -> Iterable[Finding]:
    """How to round to 4 bits is said only where something is."""
    if recipe.model.quantization != "4bit":
        yield from idle(
            recipe.model,
            _OF_4BIT,
            prefix="model",
            beside="model.quantization",
            reason="no weights have 4 bits",
            needed="`model.quantization: 4bit`",
        )


QUANTIZATION_CHECKS: tuple[Callable[[Recipe], Iterable[Finding]], ...] = (
    quantized_weights_are_frozen,
    quantized_weights_are_whole,
    rounding_reads_its_settings,
)
