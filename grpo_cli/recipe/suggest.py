"""What a misspelled or misplaced name was probably meant to be."""

import difflib
import re
from collections.abc import Iterable

from grpo_cli.recipe.kinds import fields_of
from grpo_cli.recipe.schema import VllmSection

_BATCH = "batches are stated in prompts: `train.prompts_per_step`; memory: `train.micro_batch_tokens`"
_ADAPTERS = "here it is `model.lora`, with the same keys without `lora_`"

OTHER_NAMES = {
    "batch_size": _BATCH,
    "clip_ratio": "here it is `grpo.epsilon`",
    "data_seed": "here it is `train.seed`",
    "dataset_config": "here it is `dataset.config`",
    "dataset_name": "here it is `dataset.name`",
    "dataset_streaming": "here it is `dataset.streaming`",
    "dataset_test_split": "here it is `eval.dataset.split`",
    "dataset_train_split": "here it is `dataset.split`",
    "disable_dropout": "the model's dropout is always off; leave the key out",
    "eos_token_id": "here it is `generation.stop_token_ids`",
    "epsilon_low": "here it is `grpo.epsilon`",
    "eval_on_start": "the start is always evaluated where `eval.dataset` is set; leave the key out",
    "eval_steps": "here it is `eval.every`",
    "eval_strategy": "here it is `eval.every`, in steps",
    "fp16": "here it is `train.bf16`",
    "generation_batch_size": "here it is `train.prompts_per_step` times `grpo.steps_per_generation`",
    "gradient_accumulation_steps": _BATCH,
    "group_size": "here it is `grpo.num_generations`",
    "kl_coef": "here it is `grpo.beta`",
    "log_level": "here it is `grpo --debug` on the command line",
    "logging_steps": "every step is logged; leave the key out",
    "lr": "here it is `train.learning_rate`",
    "max_new_tokens": "here it is `generation.max_completion_length`",
    "max_tokens": "here it is `generation.max_completion_length`",
    "metric_for_best_model": "here it is `eval.best_metric`",
    "model_name": "here it is `model.name_or_path`",
    "model_name_or_path": "here it is `model.name_or_path`",
    "model_revision": "here it is `model.revision`",
    "load_in_4bit": "here it is `model.quantization: 4bit`",
    "load_in_8bit": "here it is `model.quantization: 8bit`",
    "mu": "here it is `grpo.num_iterations`",
    "num_generations_eval": "here it is `eval.num_generations`",
    "optim": "the optimizer is AdamW; leave the key out",
    "per_device_eval_batch_size": "here it is `generation.max_num_seqs`",
    "per_device_train_batch_size": _BATCH,
    "push_to_hub": "the final model is a plain folder: upload it with `hf upload`",
    "remove_unused_columns": "reward functions always get all columns; leave the key out",
    "resume_from_checkpoint": "here it is `grpo train --resume`",
    "reward_model": "here it is an item of `rewards.reward_funcs` with the key `model`",
    "reward_model_name_or_path": "here it is an item of `rewards.reward_funcs` with the key `model`",
    "save_strategy": "here it is `train.save_steps`",
    "save_total_limit": "here it is `train.keep_checkpoints`",
    "shuffle_dataset": "here it is `dataset.shuffle`",
    "stop_strings": "here it is `generation.stop`",
    "torch_dtype": "here it is `model.dtype`",
    "use_liger_kernel": "logits are never built as a whole; leave the key out",
    "use_bnb_nested_quant": "here it is `model.bnb_4bit_use_double_quant`",
    "use_peft": _ADAPTERS,
    "use_vllm": "here it is `vllm.mode`: server or colocate",
    **{f"vllm_{name}": f"here it is `vllm.{name}`" for name in fields_of(VllmSection)},
    "vllm_guided_decoding_regex": "here it is `vllm.structured_outputs_regex`",
    "vllm_importance_sampling_cap": "here it is `vllm.importance_sampling_clip_max`",
    "vllm_max_model_len": "here it is `vllm.max_model_length`",
    "vllm_model_impl": "here it is `vllm.engine: {model_impl: ...}`",
    "vllm_server_base_url": "here it is `vllm.server_base_urls`, a list",
    "wandb_project": "here it is `logging.project`",
}
"""Names that users bring from TRL and its relatives, to what they are here."""

_NUMBER = re.compile(r"\d+")

_PREFIXES = {"lora": _ADAPTERS, "hub_": OTHER_NAMES["push_to_hub"]}


def other_name(name: str) -> str | None:
    """Tell what a name from elsewhere is called here."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    return next((hint for prefix, hint in _PREFIXES.items() if name.startswith(prefix)), None)


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """Give the candidate that looks most like a word, if any does. Case does not count.

    Args:
        word: What was found.
        candidates: What it may have meant.
        cutoff: How much it has to look like one, from 0 to 1.
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def of_same_number(word: str, candidates: Iterable[str]) -> str | None:
    """Give the only candidate that has the number in it which a word has, as `8bit` is meant by int8.

    Args:
        word: What was found.
        candidates: What it may have meant.
    """
    number = _NUMBER.findall(word)
    found = [candidate for candidate in candidates if number and _NUMBER.findall(candidate) == number]
    return found[0] if len(found) == 1 else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str | None:
    """Phrase `nearest` as a hint."""
    found = nearest(word, candidates)
    return None if found is None else f"did you mean `{found}`?"
