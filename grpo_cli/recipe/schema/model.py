"""`model:` the policy and its tokenizer."""

from dataclasses import dataclass
from typing import Any, Literal

from grpo_cli.recipe.schema.option import option


@dataclass(kw_only=True)
class LoraSection:
    """Low-rank adapters (LoRA): small matrices are trained beside frozen weights. The names are TRL's without `lora_`."""

    r: int = option(16, minimum=1, help="Rank of the matrices.")
    alpha: float = option(
        32.0, above=0, help="The adapters' outcome is multiplied by alpha / r, or by alpha / sqrt(r) with `use_rslora`."
    )
    target_modules: list[str] = option(
        factory=lambda: ["all-linear"],
        help="Ends of the names of the linear layers that get adapters, such as `[q_proj, v_proj]`; `[all-linear]`: all but the head, the "
        "parts in `model.freeze` and what is in `modules_to_save`, and in a mixture of experts all but routers and feed-forward layers.",
    )
    use_rslora: bool = option(False, help="Scale by the square root of the rank, so that high ranks learn as fast.")
    use_dora: bool = option(
        False,
        help="Train the length of each row of an adapted matrix apart from its direction (DoRA): slower, and at low ranks often closer to "
        "training all weights. vLLM is then sent merged weights.",
    )
    dropout: float = option(
        0.0,
        minimum=0,
        below=1,
        help="Share of an adapter's inputs that are left out in training, drawn anew for each generation and the same for all its tokens.",
    )
    modules_to_save: list[str] = option(
        factory=list,
        help="Modules that are trained whole beside the adapters, such as `[embed_tokens, lm_head]`: ends of their names, or parts as "
        "`model.freeze` names them. vLLM is then sent merged weights.",
    )
    adapter_name_or_path: str | None = option(
        None,
        help="Adapters to go on from: their folder, a checkpoint, a run directory or a hub id. They say r, alpha, target_modules, use_rslora, use_dora and modules_to_save, and the "
        "reference of the KL term is the model with them as they are there.",
    )


@dataclass(kw_only=True)
class ModelSection:
    """The policy: what to load, and how."""

    name_or_path: str = option(
        non_empty=True,
        help="Hub id, local folder, GGUF file, or `package://module/file` for a resource inside an installed package.",
    )
    random_weights_seed: int | None = option(
        None,
        minimum=0,
        help="Start from random weights, drawn with this seed: of `name_or_path` only the configuration and the tokenizer are read. "
        "For small models that learn from nothing, such as that of `vlm_tiny.yaml`.",
    )
    revision: str | None = option(None, help="Branch, tag or commit of a hub model.")
    tokenizer_name_or_path: str | None = option(None, help="Tokenizer, if it is not the model's own.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "float32",
        help="Precision of the weights that are trained. `auto` takes the checkpoint's. Keep `float32` with `train.bf16` for "
        "master weights: bfloat16 rounds small updates away, float16 is refused.",
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = option(
        "sdpa", help="Attention kernel, as transformers names it."
    )
    quantization: Literal["4bit", "8bit"] | None = option(
        None,
        help="Keep the frozen weights of linear layers in so many bits, by bitsandbytes: 0.14 or 0.25 of their memory in float32. With "
        "`lora` only, and not where weights are cut into parts (`deepspeed_zero3`, `fsdp2`).",
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option(
        "nf4", help="With `4bit`: levels at the quantiles of a normal distribution, or those of a 4-bit float."
    )
    bnb_4bit_use_double_quant: bool = option(
        False, help="With `4bit`: round the scales, too. It saves 0.4 bits per weight."
    )
    bnb_4bit_compute_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", help="With `4bit`: what products are computed in. `auto`: as other layers."
    )
    share_prefix: bool = option(
        True,
        help="Compute a prompt once for all its completions, in training and in the local engine. `false` repeats it in padded rows "
        "and takes the model's own cache: the same numbers, slower.",
    )
    trust_remote_code: bool = option(
        False, help="Run Python code that comes with a hub model. Off unless you read that code."
    )
    chat_template_path: str | None = option(None, help="Jinja file that replaces the tokenizer's chat template.")
    processor_kwargs: dict[str, Any] = option(
        factory=dict,
        help="Options of a vision-language model's processor, such as `{size: {shortest_edge: 3136, longest_edge: 602112}}`, the fewest and "
        "the most pixels of an image for Qwen2.5-VL; fewer pixels are fewer tokens.",
    )
    freeze: list[str] = option(
        factory=list,
        help="Parts that are not trained: `vision_tower`, `projector` and `language_model` of a vision-language model, or names of "
        "modules, such as `lm_head`.",
    )
    lora: LoraSection | None = option(
        None,
        help="Train low-rank adapters instead of all weights: `{}` with the defaults below. The reference of the KL term is then the "
        "model without them, and checkpoints hold them alone.",
    )
