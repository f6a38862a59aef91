"""Adapters, and the weights that they are trained on, in a line."""

from collections.abc import Sequence

from grpo_cli.recipe.schema import ModelSection

_NAMES_SHOWN = 8


def adapters_in_words(model: ModelSection, *, read: bool = True) -> str | None:
    """Say what `model.lora` and `model.quantization` ask for; None: all weights are trained.

    Args:
        model: The recipe's `model:`.
        read: Whether it has been told what the adapters are like that it goes on from.
    """
    lora = model.lora
    if lora is None:
        return None
    begun, rounding = lora.adapter_name_or_path, [] if model.quantization is None else [f"on weights in {_bits(model)}"]
    if begun is not None and not read:
        return "; ".join([f"those of {begun}", *rounding])
    kinds = [name for name, is_on in (("rsLoRA", lora.use_rslora), ("DoRA", lora.use_dora)) if is_on]
    said = [
        " ".join([*kinds, f"rank {lora.r}, alpha {lora.alpha:g}, on {_ends(lora.target_modules)}"]),
        *([f"{_ends(lora.modules_to_save)} trained whole"] if lora.modules_to_save else []),
        *([f"dropout {lora.dropout:g}"] if lora.dropout else []),
        *([] if begun is None else [f"going on from {begun}"]),
        *rounding,
    ]
    return "; ".join(said)


def _bits(model: ModelSection) -> str:
    if model.quantization != "4bit":
        return "8 bits"
    double = ", scales rounded too" if model.bnb_4bit_use_double_quant else ""
    computes = "" if model.bnb_4bit_compute_dtype == "auto" else f", multiplied in {model.bnb_4bit_compute_dtype}"
    return f"4 bits ({model.bnb_4bit_quant_type}{double}{computes})"


def _ends(names: Sequence[str]) -> str:
    """Give the last parts of names, each once."""
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return ", ".join(ends[:_NAMES_SHOWN]) + (", ..." if len(ends) > _NAMES_SHOWN else "")
