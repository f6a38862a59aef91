"""Rules across the keys of `vllm:`: what its modes read, what can be reached, and what the objective can correct."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from grpo_cli.recipe.addresses import is_base_url, is_host, is_loopback, split_url
from grpo_cli.recipe.eval_tasks import evaluation_tasks
from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.idle_settings import changed, idle
from grpo_cli.recipe.kinds import fields_of, show
from grpo_cli.recipe.objective_rules import corrects_rollouts
from grpo_cli.recipe.schema import EvalSection, GenerationSection, Recipe, VllmSection

_SERVER_ONLY = (
    "start",
    "server_host",
    "server_port",
    "server_base_urls",
    "token_file",
    "server_timeout",
    "connect_timeout",
    "request_timeout",
    "group_host",
    "group_port",
    "weight_transport",
    "data_parallel_size",
)
_UNREAD: Mapping[str | None, tuple[tuple[str, ...], str, str]] = {
    None: (
        tuple(name for name in fields_of(VllmSection) if name != "mode"),
        "the built-in engine samples",
        "`vllm.mode: server` or `vllm.mode: colocate`",
    ),
    "colocate": (_SERVER_ONLY, "vLLM runs in the training process", "`vllm.mode: server`"),
    "server": (("enable_sleep_mode",), "vLLM runs in a process of its own", "`vllm.mode: colocate`"),
}
"""By mode: the settings without effect, why, and with what they have one."""

_CORRECTION_SETTINGS = ("importance_sampling_mode", "importance_sampling_clip_max", "importance_sampling_clip_min")

ENGINE_ARGUMENTS: Mapping[str, str] = {
    "model": "model.name_or_path",
    "tokenizer": "model.tokenizer_name_or_path",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "train.seed",
    "dtype": "vllm.dtype",
    "max_model_len": "vllm.max_model_length",
    "tensor_parallel_size": "vllm.tensor_parallel_size",
    "data_parallel_size": "vllm.data_parallel_size",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enable_sleep_mode": "vllm.enable_sleep_mode",
}
"""Arguments of vLLM's engine that have a key of their own."""
FIXED_ENGINE_ARGUMENTS: Mapping[str, str] = {
    "logprobs_mode": "training needs the log-probabilities of the distribution that is sampled from",
    "generation_config": "the recipe alone says how completions are sampled",
    "served_model_name": "a server calls its model what the recipe calls it",
    "worker_extension_cls": "new weights arrive through it",
    "weight_transfer_config": "new weights arrive through it",
}
"""Arguments of vLLM's engine that training has to set, and why."""
TEMPERATURES = (0.01, 2.0)
"""What vLLM samples with besides 0: it raises less than that without an error, and refuses more."""


def mode_reads_its_settings(recipe: Recipe) -> Iterable[Finding]:
    """The built-in engine reads no setting of vLLM's, and each mode has some of its own."""
    unread, reason, needed = _UNREAD[recipe.vllm.mode]
    yield from idle(recipe.vllm, unread, prefix="vllm", beside="vllm.mode", reason=reason, needed=needed)


def adapters_can_be_merged(recipe: Recipe) -> Iterable[Finding]:
    """Without adapters, all weights are sent as they are."""
    if recipe.vllm.mode is not None and recipe.model.lora is None:
        yield from idle(
            recipe.vllm,
            ("merge_adapters",),
            prefix="vllm",
            beside="model.lora",
            reason="all weights are trained",
            needed="`model.lora`",
        )


def correction_reads_its_settings(recipe: Recipe) -> Iterable[Finding]:
    """How to correct is said only where something is corrected."""
    section = recipe.vllm
    if section.mode is None or section.importance_sampling_correction:
        return
    yield from idle(
        section,
        _CORRECTION_SETTINGS,
        prefix="vllm",
        beside="vllm.importance_sampling_correction",
        reason="nothing is corrected",
        needed="`vllm.importance_sampling_correction: true`",
    )


def correction_lets_equal_probabilities_through(recipe: Recipe) -> Iterable[Finding]:
    """Where engine and trainer agree the ratio is 1: it lies within the bounds, and they leave it room."""
    section = recipe.vllm
    if not corrects_rollouts(recipe):
        return
    lowest, highest = section.importance_sampling_clip_min, section.importance_sampling_clip_max
    low, high = "vllm.importance_sampling_clip_min", "vllm.importance_sampling_clip_max"
    reason = "because the ratio is 1 where vLLM and the trainer agree"
    if lowest is not None and highest is not None and lowest >= highest:
        yield Finding(
            keys=(low, high),
            message=f"found {lowest:g}; allowed: below importance_sampling_clip_max, which is {highest:g}",
        )
    elif highest is not None and highest < 1:
        yield Finding(keys=(high,), message=f"found {highest:g}; allowed: at least 1, {reason}", hint="3 is usual")
    elif lowest is not None and lowest > 1:
        yield Finding(keys=(low,), message=f"found {lowest:g}; allowed: at most 1, {reason}", hint="0.5 is usual")


def correction_fits_the_loss(recipe: Recipe) -> Iterable[Finding]:
    """The vespo loss multiplies the ratios of a completion itself."""
    section, loss = recipe.vllm, recipe.grpo.loss_type
    if loss != "vespo" or not corrects_rollouts(recipe):
        return
    level, _, action = section.importance_sampling_mode.partition("_")
    if level != "token":
        yield Finding(
            keys=("vllm.importance_sampling_mode", "grpo.loss_type"),
            message=f"found {section.importance_sampling_mode}; allowed with loss_type {loss}: token_truncate, token_mask, because it "
            "multiplies the ratios of a completion itself",
            hint=f"set `importance_sampling_mode: token_{action}`",
        )


def servers_are_named_once(recipe: Recipe) -> Iterable[Finding]:
    """A list of servers stands alone: nothing else says where they are, and the run does not start them."""
    section = recipe.vllm
    if section.mode != "server" or not section.server_base_urls:
        return
    for name, value, hint in changed(section, ("start", "server_host", "server_port")):
        yield Finding(
            keys=(f"vllm.{name}", "vllm.server_base_urls"),
            message=f"found {value}, but server_base_urls names servers that run already; allowed without it",
            hint=hint,
        )


def servers_can_be_reached(recipe: Recipe) -> Iterable[Finding]:
    """Addresses have the form of addresses."""
    section = recipe.vllm
    if section.mode != "server":
        return
    for name, hint in (
        ("server_host", "the port goes into `vllm.server_port`, a whole URL into `vllm.server_base_urls`"),
        ("group_host", "the port goes into `vllm.group_port`"),
    ):
        host = getattr(section, name)
        if host is not None and not is_host(host):
            yield Finding(
                keys=(f"vllm.{name}",),
                message=f"found {show(host)}; allowed: a host name or an address, with nothing around it",
                hint=hint,
            )
    seen: dict[str, int] = {}
    for index, url in enumerate(section.server_base_urls):
        key = f"vllm.server_base_urls[{index}]"
        first = seen.setdefault(url.rstrip("/").lower(), index)
        if not is_base_url(url):
            yield Finding(
                keys=(key,),
                message=f"found {show(url)}; allowed: http:// or https:// with a host and a port, and nothing after them",
                hint=_as_base_url(url),
            )
        elif first != index:
            yield Finding(
                keys=(key, f"vllm.server_base_urls[{first}]"),
                message=f"found {show(url)} a second time; allowed: each server once",
            )


def _as_base_url(url: str) -> str | None:
    """Guess what a URL was meant to be."""
    parts = split_url(url if "://" in url else f"http://{url}")
    if parts is None:
        return None
    if "@" in parts.netloc:
        return "a secret goes into `vllm.token_file`"
    guess = f"{parts.scheme}://{parts.netloc}"
    return f"did you mean `{guess}`?" if is_base_url(guess) else None


def started_server_is_private(recipe: Recipe) -> Iterable[Finding]:
    """A server that lives as long as the run has no other users."""
    section = recipe.vllm
    if (
        section.mode == "server"
        and section.start
        and not section.server_base_urls
        and not is_loopback(section.server_host)
    ):
        yield Finding(
            keys=("vllm.server_host", "vllm.start"),
            message=f"found {section.server_host}; allowed with `start`: 127.0.0.1, ::1, localhost, because the server is started on "
            "this machine, for this run",
            hint="run `grpo vllm-serve` for a server on another machine",
        )


def weights_travel_as_told(recipe: Recipe) -> Iterable[Finding]:
    """Only a process group has an address."""
    section = recipe.vllm
    if section.mode != "server" or section.weight_transport in ("auto", "process_group"):
        return
    for name, value, hint in changed(section, ("group_host", "group_port")):
        yield Finding(
            keys=(f"vllm.{name}", "vllm.weight_transport"),
            message=f"found {value}, but weight_transport {section.weight_transport} does not use it; allowed with auto, process_group",
            hint=hint,
        )


def model_length_fits(recipe: Recipe) -> Iterable[Finding]:
    """The longest prompt and completion that the recipe allows have room."""
    most = recipe.vllm.max_model_length
    if recipe.vllm.mode is None or most is None:
        return
    for keys, prompt, completion in _lengths(recipe):
        needed = completion + (1 if prompt is None else prompt)
        if most < needed:
            prompts = "a prompt" if prompt is None else keys[0]
            yield Finding(
                keys=("vllm.max_model_length", *keys),
                message=f"found {most}; allowed: at least {needed}, for {prompts} and {keys[1]} ({completion})",
                hint="leave the key out for what this run can need",
            )
            return


def longest_allowed(recipe: Recipe) -> int | None:
    """Count the tokens of the longest prompt and completion that a recipe allows in training and evaluation; None: it has no bound."""
    longest = 0
    for _, prompt, completion in _lengths(recipe):
        if prompt is None:
            return None
        longest = max(longest, prompt + completion)
    return longest


def _lengths(recipe: Recipe) -> Iterator[tuple[tuple[str, str], int | None, int]]:
    """Give the bounds on prompts and on completions of training and of evaluation, with their keys."""
    key, completion = "generation.max_completion_length", recipe.generation.max_completion_length
    yield ("dataset.max_prompt_length", key), recipe.dataset.max_prompt_length, completion
    for task in evaluation_tasks(recipe):
        own = task.settings.max_completion_length
        yield (
            (f"{task.key}.max_prompt_length", key if own is None else task.key_of("max_completion_length")),
            task.dataset.max_prompt_length,
            completion if own is None else own,
        )


def expression_is_one(recipe: Recipe) -> Iterable[Finding]:
    """The dialects of vLLM's backends differ; what Python cannot read, hardly any of them can."""
    expression = recipe.vllm.structured_outputs_regex
    if recipe.vllm.mode is None or expression is None:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a later Python may read in another way
            re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        yield Finding(
            keys=("vllm.structured_outputs_regex",),
            message=f"found {show(expression)}; allowed: a regular expression ({error})",
        )


def engine_arguments_are_free(recipe: Recipe) -> Iterable[Finding]:
    """What has a key of its own, or what training depends on, is not set a second time."""
    return () if recipe.vllm.mode is None else taken_engine_arguments(recipe.vllm.engine)


def taken_engine_arguments(further: Mapping[str, Any]) -> Iterator[Finding]:
    """Report the arguments of vLLM's engine that are not for `vllm.engine` to set.

    Args:
        further: As `vllm.engine` has them.
    """
    for argument, value in further.items():
        name = argument.replace("-", "_")
        if name in ENGINE_ARGUMENTS:
            yield Finding(
                keys=(f"vllm.engine.{argument}",),
                message=f"found {show(value)}; allowed: arguments without a key of their own",
                hint=f"here it is `{ENGINE_ARGUMENTS[name]}`",
            )
        elif name in FIXED_ENGINE_ARGUMENTS:
            yield Finding(
                keys=(f"vllm.engine.{argument}",),
                message=f"found {show(value)}; cannot be set, because {FIXED_ENGINE_ARGUMENTS[name]}",
                hint="leave it out",
            )


def sampling_is_vllms(recipe: Recipe) -> Iterable[Finding]:
    """Not every temperature is drawn with, and two of the filters are taken in the other order than by the trainer."""
    if recipe.vllm.mode is None:
        return
    yield from _sampled_otherwise("generation.{}".format, recipe.generation)
    for task in evaluation_tasks(recipe):
        if task.settings.temperature > 0:
            yield from _sampled_otherwise(task.key_of, task.settings)


def _sampled_otherwise(key_of: Callable[[str], str], section: GenerationSection | EvalSection) -> Iterable[Finding]:
    least, most = TEMPERATURES
    if not least <= section.temperature <= most:
        yield Finding(
            keys=(key_of("temperature"), "vllm.mode"),
            message=f"found {section.temperature:g}; allowed with vLLM: {least:g} to {most:g}"
            + (", or 0, which takes the likeliest token" if isinstance(section, EvalSection) else ""),
            hint="leave out `vllm.mode` to sample with the built-in engine",
        )
    if section.min_p > 0 and section.top_p < 1:
        yield Finding(
            keys=(key_of("min_p"), key_of("top_p"), "vllm.mode"),
            message=f"found {section.min_p:g} beside top_p {section.top_p:g}; allowed with vLLM: one of them, because it takes them "
            "in the other order, which gives other probabilities than the trainer's",
            hint="leave out `vllm.mode` to sample with the built-in engine",
        )


VLLM_CHECKS: tuple[Callable[[Recipe], Iterable[Finding]], ...] = (
    mode_reads_its_settings,
    adapters_can_be_merged,
    correction_reads_its_settings,
    correction_lets_equal_probabilities_through,
    correction_fits_the_loss,
    servers_are_named_once,
    servers_can_be_reached,
    started_server_is_private,
    weights_travel_as_told,
    model_length_fits,
    expression_is_one,
    engine_arguments_are_free,
    sampling_is_vllms,
)
