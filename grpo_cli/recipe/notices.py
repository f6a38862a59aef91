"""What a recipe may say and probably does not mean: shown in one line each, and not in the way of a run."""

import math
import os
from collections.abc import Callable, Iterable

from grpo_cli.recipe.addresses import TOKEN_VARIABLE, is_loopback, server_addresses, split_url
from grpo_cli.recipe.eval_tasks import evaluation_tasks
from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.idle_settings import changed
from grpo_cli.recipe.imports import find_installed
from grpo_cli.recipe.schema import DatasetSection, Recipe

_SMALL_LEARNING_RATE = 1e-5
_BFLOAT16_REACH = 512
"""bfloat16 keeps 8 significant bits: less than 1/512 of a weight is always rounded away when it is added to the weight."""


def notices(recipe: Recipe) -> tuple[str, ...]:
    """Give one line per notice, with its key.

    Args:
        recipe: One that is allowed.
    """
    findings = [finding for look in _LOOKS for finding in look(recipe)]
    return tuple(f"{one.keys[0]}: {one.message}" + (f" ({one.hint})" if one.hint else "") for one in findings)


def missing_engine(recipe: Recipe) -> str | None:
    """Say that vLLM is not installed where the recipe runs it; None if it is, or need not be.

    A recipe may be checked on another machine than it is run on, so that this is for `grpo check` to tell and for a run to refuse.

    Args:
        recipe: One that is allowed.
    """
    section = recipe.vllm
    if (section.mode != "colocate" and not section.start) or find_installed("vllm") is not None:
        return None
    key, value = ("mode", "colocate") if section.mode == "colocate" else ("start", "true")
    return f"vllm.{key}: found {value}, but vLLM is not installed here; a run needs it (pip install vllm)"


def updates_vanish(recipe: Recipe) -> Iterable[Finding]:
    """AdamW moves a weight by about the learning rate; weights without master copies round that."""
    rate, dtype = recipe.train.learning_rate, recipe.model.dtype
    if dtype not in ("auto", "bfloat16") or not 0 < rate < _SMALL_LEARNING_RATE:
        return
    if recipe.distributed.strategy.startswith("deepspeed"):  # which keeps float32 copies
        return
    weights = "bfloat16 weights" if dtype == "bfloat16" else "weights of a checkpoint in bfloat16"
    yield Finding(
        keys=("model.dtype", "train.learning_rate"),
        message=f"found {dtype} with learning rate {rate:g}; {weights} above about {_BFLOAT16_REACH * rate:.2g} in size will not "
        "move, because a step of the optimizer is less than their rounding",
        hint="use float32 with `train.bf16: true`",
    )


def evaluation_is_held_out(recipe: Recipe) -> Iterable[Finding]:
    """Rows that are trained on cannot tell learning from memorising."""
    for task in evaluation_tasks(recipe):
        evaluated = task.dataset
        if _rows(evaluated) == _rows(recipe.dataset):
            yield Finding(
                keys=(task.key, "dataset"),
                message=f"found {evaluated.name} ({evaluated.split}), which is trained on as well, so that evaluation cannot tell "
                "learning from memorising",
                hint="use another split or file",
            )


def servers_have_a_token(recipe: Recipe) -> Iterable[Finding]:
    """Whoever reaches a server without a token can give it other weights."""
    section = recipe.vllm
    if section.mode != "server" or section.token_file is not None or os.environ.get(TOKEN_VARIABLE):
        return
    for address in server_addresses(section):
        parts = split_url(address)
        if parts is not None and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            key = "server_base_urls" if section.server_base_urls else "server_host"
            yield Finding(
                keys=(f"vllm.{key}",),
                message=f"found {address} without a token; `grpo vllm-serve` listens to other machines only with one, because "
                "whoever reaches a server can change its weights",
                hint=f"set `vllm.token_file`, or the environment variable {TOKEN_VARIABLE}",
            )
            return


def engine_limits_itself(recipe: Recipe) -> Iterable[Finding]:
    """How many completions are sampled at once is for vLLM to decide."""
    if recipe.vllm.mode is None:
        return
    for name, value, _ in changed(recipe.generation, ("max_num_seqs",)):
        yield Finding(
            keys=(f"generation.{name}", "vllm.mode"),
            message=f"found {value}, which the built-in engine reads; vLLM takes as many completions at once as fit",
            hint=f"`vllm.engine: {{{name}: {value}}}` bounds them",
        )


def expression_is_unknown_to_the_trainer(recipe: Recipe) -> Iterable[Finding]:
    """Tokens that an expression rules out have no probability in vLLM, and theirs is spread over the others."""
    if recipe.vllm.structured_outputs_regex is None:
        return
    yield Finding(
        keys=("vllm.structured_outputs_regex",),
        message="found an expression; vLLM's log-probabilities are of the tokens that it leaves, the trainer's of all tokens, so that "
        "`sampling/logp_difference` and the importance ratio show the expression as well",
        hint="the rollout correction weighs it; without the correction the gradient is that of other samples",
    )


def some_completions_are_not_written(recipe: Recipe) -> Iterable[Finding]:
    """Whoever reads completion files should know that they are a part."""
    logging, most = recipe.logging, recipe.logging.num_completions_to_log
    sampled = recipe.train.prompts_per_step * recipe.grpo.steps_per_generation * recipe.grpo.num_generations
    if not logging.log_completions or most is None:
        return
    written = math.ceil(most / recipe.grpo.num_generations) * recipe.grpo.num_generations
    if written >= sampled:
        return
    yield Finding(
        keys=("logging.num_completions_to_log",),
        message=f"found {most}; of {sampled:,} completions that are sampled at once {written:,} are written, those of the first prompts",
        hint="null writes all, logging.log_completions: false none",
    )


def _rows(dataset: DatasetSection) -> tuple[object, ...]:
    return (dataset.name, dataset.config, dataset.split, dataset.revision, dataset.arguments)


_LOOKS: tuple[Callable[[Recipe], Iterable[Finding]], ...] = (
    updates_vanish,
    evaluation_is_held_out,
    servers_have_a_token,
    engine_limits_itself,
    expression_is_unknown_to_the_trainer,
    some_completions_are_not_written,
)
