"""vLLM inside the training process, or spread over several of them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import AutoConfig

from grpo_cli.errors import LostProcessError, ModelError, TrainingError
from grpo_cli.recipe.vllm_rules import ENGINE_ARGUMENTS
from grpo_cli.rollout.cached_values import cached_values_per_token
from grpo_cli.rollout.engine import OnGroup
from grpo_cli.rollout.sync.adapters import Adapters
from grpo_cli.rollout.sync.buckets import sent_dtype
from grpo_cli.rollout.vllm.completion import completed_group, sampled_tokens
from grpo_cli.rollout.vllm.containment import Containment, spared_process_group
from grpo_cli.rollout.vllm.prompt_images import rendered
from grpo_cli.rollout.vllm.sampling import first_seed, sampling_fields
from grpo_cli.types import Group, PolicyVersion, Prompt, Sampling, SyncReport

_ADAPTER_ARGUMENTS = ("enable_lora", "max_loras", "max_lora_rank")

_BLOCK_TOKENS = 128
"""What vLLM's cache on CPUs is divided into."""


class ColocateEngine:
    """Samples by a vLLM engine in this process, or by this process's part of one, from a copy of the weights. See `RolloutEngine`.

    If several processes train, all of them make one at the same time, and `tensor_parallel_size` neighbouring ones share an engine: they
    make the same calls with the same arguments. Each has all completions, and gives its part all weights.

    It starts without weights and asserts that a sync comes before the first sample. What vLLM does to the process is put back
    after each call (see `containment`); if nobody had made a process group, there is one of vLLM's until `close`.

    An engine that sleeps gives its weights and its cache back when it rests. Weights come from the trainer when it wakes, never from
    where they were put aside: by a sync, or else by the last one's weights again, which are the same until the next.

    Args:
        arguments: Of `engine_arguments`. The model's folder needs no weights.
        tokenizer: Decodes completions.
        bucket_bytes: Weights that are held twice at once, beside the layers that are not complete.
        dtype: In which weights are handed over, see `sent_dtype`; None: as they are.
        max_num_seqs: Most completions that are sampled at once.
        adapters: The live policy's, which are taken instead of the weights that `sync` is given; None: it has none, or `arguments` make
            no room for them.
        sleeps: Whether `rest` gives its memory back.
        on_progress: Called after every prompt with the number of tokens of its completions.
        on_notice: Told, in a line, if vLLM has no adapters for this model.

    Attributes:
        weight_copies: 1.

    Raises:
        TrainingError: If vLLM is not installed, or cannot do what `arguments` say in training processes.
        ModelError: If the engine does not start with this model.
        LostProcessError: If another process that the engine is spread over has ended, as for `generate`.
    """

    weight_copies = 1

    def __init__(
        self,
        arguments: Mapping[str, Any],
        tokenizer: Any,
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        max_num_seqs: int,
        adapters: Adapters | None = None,
        sleeps: bool = False,
        on_progress: Callable[[int], None] | None = None,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._adapters = adapters
        self._has_base = False
        self._sleeps = sleeps
        self._on_progress = on_progress or (lambda _: None)
        self._weights: Iterable[tuple[str, Tensor]] = ()
        self._version: PolicyVersion | None = None
        self._has_weights = self._rests = False
        self._contained = Containment()
        self._group_is_ours = not distributed.is_initialized()
        self._llm: Any = None
        self._closing = ExitStack()
        with self._contained(), ExitStack() as failed:
            engine = _engine_class(arguments)
            self._closing.callback(self._shut_down)
            failed.callback(self.close)
            with _lost_processes():
                self._llm = _start(engine, {"max_num_seqs": max_num_seqs, **arguments, **_placement()})
            self._loading = _update_loading(self._llm)
            if adapters is not None and self._llm.llm_engine.vllm_config.lora_config is None:
                self._adapters = None
                if on_notice is not None:
                    on_notice(
                        "vLLM has no adapters for this model: it gets all weights with the adapters merged into them"
                    )
            self._request = None if self._adapters is None else _adapter_request()
            failed.pop_all()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        seed_key: tuple[int | str, ...],
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """Sample `num_generations` completions for each prompt. See `RolloutEngine.generate`.

        Raises:
            TrainingError: If vLLM cannot draw that way, or a sequence may become too long for it.
        """
        assert self._version is not None, "no weights yet"
        if not prompts:
            return []
        self._check_length(max(len(prompt.ids) for prompt in prompts) + sampling.max_tokens)
        if not self._has_weights:
            self._load()
        # Greedy completions of a prompt are all the same, and vLLM refuses to sample them more than once.
        copies = num_generations if sampling.temperature == 0.0 else 1
        with self._contained():
            parameters = [self._parameters(prompt, sampling, num_generations // copies, seed_key) for prompt in prompts]
            if self._llm.llm_engine.is_sleeping():
                self._llm.wake_up(tags=["kv_cache"])
            with _lost_processes():
                return self._sample(prompts, parameters, copies, self._version, on_group)

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> SyncReport:
        """Copy new weights into the engine. See `RolloutEngine.sync`."""
        self._weights = named_weights
        self._version = None
        num_bytes = self._load()
        self._version = version
        return SyncReport(version=version, bytes=num_bytes)

    def rest(self) -> None:
        """Give memory back, if the engine is one that sleeps. See `RolloutEngine.rest`."""
        if not self._sleeps or self._rests:
            return
        self._rests, self._has_weights, self._has_base = True, False, False
        with self._contained():
            if self._llm.llm_engine.is_sleeping():  # its cache is still, and what sleeps in part cannot be put to sleep
                self._llm.wake_up(tags=["kv_cache"])
            self._llm.sleep(level=2)

    def close(self) -> None:
        """Shut the engine down, and give back what it holds."""
        self._closing.close()

    def _load(self) -> int:
        """Copy the trainer's weights into the engine, which may be asleep, and give their bytes. Nothing gets lost on this way."""
        from vllm.config import set_current_vllm_config  # noqa: PLC0415  only within a containment

        num_bytes = 0
        weights = self._weights
        if self._adapters is not None:
            had_base = self._has_base
            weights = self._adapters.after(lambda: had_base)
        self._has_weights = self._has_base = False
        with self._contained(), set_current_vllm_config(self._llm.llm_engine.vllm_config), torch.no_grad():
            if self._llm.llm_engine.is_sleeping():
                self._llm.wake_up(tags=["weights"])
            self._rests = False
            self._loading.begin()
            for part in _copies(weights, self._bucket_bytes, self._dtype):
                self._loading.load(part)
                num_bytes += sum(tensor.nbytes for _, tensor in part)
                del part  # before the next one is made
            self._loading.finish()
            self._loading.activate()
            forgotten = self._llm.reset_prefix_cache()
            assert forgotten, "requests are running"
            self._llm.llm_engine.reset_encoder_cache()
        self._has_weights = self._has_base = True
        return num_bytes

    def _check_length(self, longest: int) -> None:
        """Refuse what vLLM would cut without a word."""
        most = self._llm.model_config.max_model_len
        if longest > most:
            raise TrainingError(
                f"vllm.max_model_length: vLLM takes prompt and completion of up to {most} tokens together; here they can have {longest}",
                hint="raise it, or lower dataset.max_prompt_length or generation.max_completion_length",
            )

    def _parameters(self, prompt: Prompt, sampling: Sampling, n: int, seed_key: tuple[int | str, ...]) -> Any:
        """Make vLLM's sampling parameters for a prompt."""
        from grpo_cli.rollout.vllm.engine_parameters import engine_parameters  # noqa: PLC0415  it imports vLLM

        return engine_parameters(sampling_fields(sampling, n=n, seed=first_seed(seed_key, prompt.uid, n=n)))

    def _sample(
        self,
        prompts: Sequence[Prompt],
        parameters: Sequence[Any],
        copies: int,
        version: PolicyVersion,
        on_group: OnGroup | None,
    ) -> list[Group]:
        """Drive the engine until all requests are answered; drop those that are not if this is left early."""
        engine = self._llm.llm_engine
        assert not engine.is_sleeping(), "it would wait for ever"
        answers: dict[str, Group] = {}
        names = [str(number) for number in range(len(prompts))]
        try:
            for name, prompt, wanted in zip(names, prompts, parameters, strict=True):
                asked = rendered(prompt, tokenizer=self._tokenizer, engine=engine)
                engine.add_request(name, asked, wanted, lora_request=self._request)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    sampled = [sampled_tokens(one) for one in output.outputs] * copies
                    prompt = prompts[int(output.request_id)]
                    group = completed_group(prompt, sampled, tokenizer=self._tokenizer, version=version)
                    answers[output.request_id] = group
                    self._on_progress(sum(len(one.ids) for one in sampled))
                    if on_group is not None:
                        on_group(group)
        except BaseException:
            engine.abort_request([name for name in names if name not in answers])
            raise
        return [answers[name] for name in names]

    def _shut_down(self) -> None:
        """End what there is of the engine, but not the process group that was there before it."""
        from vllm.distributed import cleanup_dist_env_and_memory  # noqa: PLC0415  only within a containment

        with self._contained(), ExitStack() as stack:
            if not self._group_is_ours:
                stack.enter_context(spared_process_group())
            if self._llm is not None:
                self._llm.llm_engine.engine_core.shutdown()
                self._llm = None
            cleanup_dist_env_and_memory()  # a start that failed has left groups behind


def _copies(
    named: Iterable[tuple[str, Tensor]], part_bytes: int, dtype: torch.dtype | None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Copy weights, some at a time: vLLM keeps them until their layer is complete, longer than the trainer may."""
    part: list[tuple[str, Tensor]] = []
    for name, tensor in named:
        part.append((name, tensor.detach().to(sent_dtype(name, tensor, dtype), copy=True)))
        if sum(copy.nbytes for _, copy in part) >= part_bytes:
            yield part
            part = []
    if part:
        yield part


def _update_loading(llm: Any) -> Any:
    """Give what replaces the weights of the engine's model."""
    from grpo_cli.rollout.vllm.adapter_loading import UpdateLoading  # noqa: PLC0415  it imports vLLM

    (loading,) = llm.collective_rpc(lambda worker: UpdateLoading(worker.model_runner.get_model(), worker.model_config))
    return loading


def _adapter_request() -> Any:
    """Give what a request for completions by the adapters carries."""
    from grpo_cli.rollout.vllm.adapter_loading import adapter_request  # noqa: PLC0415  it imports vLLM

    return adapter_request()


def _engine_class(arguments: Mapping[str, Any]) -> Any:
    """Give vLLM's engine, if it can do here what it is told."""
    for name, only in (
        ("data_parallel_size", 1),
        ("pipeline_parallel_size", 1),
        ("prefill_context_parallel_size", 1),
        ("distributed_executor_backend", None),
    ):
        found = arguments.get(name, only)
        if found != only:  # weights would have to reach other processes
            raise TrainingError(
                f"{ENGINE_ARGUMENTS.get(name, f'vllm.engine.{name}')}: found {found}; with vllm.mode: colocate vLLM is in the processes "
                "that train, and has none of its own",
                hint="leave it out, or set vllm.mode to server",
            )
    try:
        from vllm import LLM  # noqa: PLC0415  only within a containment
        from vllm.platforms import current_platform  # noqa: PLC0415
    except ImportError as error:
        raise TrainingError(
            f"vllm.mode: colocate needs vLLM in the Python that trains: {error}", hint="pip install vllm"
        ) from error
    if arguments.get("enable_sleep_mode") and not current_platform.is_sleep_mode_available():
        raise TrainingError(
            f"vllm.enable_sleep_mode: vLLM can give memory back on GPUs only; here it runs on {current_platform.device_type}",
            hint="leave it out",
        )
    return LLM


def _placement() -> dict[str, Any]:
    """Say where the engine runs, if not in one process alone: in those that train, by the process group that they have."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return {}
    return {"distributed_executor_backend": "external_launcher"}


@contextmanager
def _lost_processes() -> Iterator[None]:
    """Tell errors of the transport between the processes of an engine: another one has ended."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_transport(error):
            raise
        raise LostProcessError.shown_by(error) from error


def _is_of_transport(error: BaseException) -> bool:
    """Tell errors of collective operations; gloo's and those of vLLM's binding of NCCL have no class of their own."""
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, distributed.DistError) or any(name in str(error) for name in ("gloo/", "NCCL error"))


def _start(engine: Any, arguments: dict[str, Any]) -> Any:
    """Build the engine. It reads no weights: they all come from the trainer, which is checked with every sync."""
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415  only within a containment

    from grpo_cli.rollout.vllm.communicator import exchange_by_gloo  # noqa: PLC0415  it imports vLLM

    try:
        everything = {"load_format": "dummy", **_with_bounded_cache(arguments)}
        model = EngineArgs(**everything).create_model_config()
        if everything.get("enable_lora") and not _takes_adapters(model):
            everything = {name: value for name, value in everything.items() if name not in _ADAPTER_ARGUMENTS}
        if not model.using_transformers_backend():
            with exchange_by_gloo():
                return engine(use_tqdm_on_load=False, **everything)
    except (ValueError, RuntimeError, NotImplementedError, ImportError) as error:
        if _is_of_transport(error):
            raise
        raise ModelError(f"vLLM does not start with {arguments['model']}: {_reason(error)}") from error
    raise ModelError(
        f"vLLM would run {arguments['model']} ({', '.join(model.architectures)}) with transformers' classes, which it changes for the whole "
        "process, and with it for training",
        hint="set vllm.mode to server: vLLM then has a process of its own",
    )


def _takes_adapters(model_config: Any) -> bool:
    """Tell whether vLLM's class for a model can have adapters."""
    kind, _ = model_config.registry.resolve_model_cls(model_config.architectures, model_config)
    return bool(getattr(kind, "supports_lora", False))


def _reason(error: Exception) -> str:
    """Give the sentence that says why; a validation error has a headline above it and its input below."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    told = next((line for line in lines if "error, " in line), lines[0])
    sentence = told.partition("error, ")[2].partition(" [type=")[0] or told
    return sentence.partition(". ")[0]


def _with_bounded_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """Lower the size of the cache, where it is given, to what the longest completions can fill: all of it is taken at once."""
    given, longest = arguments.get("kv_cache_memory_bytes"), arguments["max_model_len"]
    if given is None or longest <= 0:
        return arguments
    config = AutoConfig.from_pretrained(
        arguments["model"],
        revision=arguments.get("revision"),
        trust_remote_code=arguments.get("trust_remote_code", False),
    )
    values = cached_values_per_token(config.get_text_config(), parts=arguments.get("tensor_parallel_size", 1))
    if values is None:
        return arguments
    block_bytes = _BLOCK_TOKENS * values * getattr(torch, arguments["dtype"], torch.float32).itemsize
    blocks = 1 + arguments["max_num_seqs"] * math.ceil(longest / _BLOCK_TOKENS)  # one is never used
    return arguments | {"kv_cache_memory_bytes": min(given, blocks * block_bytes)}
