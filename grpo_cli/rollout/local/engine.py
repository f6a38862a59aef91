"""The local engine: generation with the policy itself, in this process, sharing its weights.

Each prompt goes through the model once and its keys and values are held once for its group; finished rows leave and waiting
ones join while others are being sampled; the log-probability of every token is kept as it is drawn. Models that cannot be fed
that way are sampled with their own cache, in rows that begin together.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_cli import flash
from grpo_cli.device_memory import is_out_of_memory, release_unused, trim_heap
from grpo_cli.rollout.engine import OnGroup
from grpo_cli.rollout.local.decoder import CacheDecoder, Decoder, evaluating
from grpo_cli.rollout.local.finished_groups import FinishedGroups
from grpo_cli.rollout.local.group_check import obstacle, window_of
from grpo_cli.rollout.local.group_decoder import GroupDecoder, attending_by_groups
from grpo_cli.rollout.local.packed_linear import packed_linears
from grpo_cli.rollout.local.prompt_images import PromptImages
from grpo_cli.rollout.local.rows import Row, RowSampler
from grpo_cli.rollout.local.stops import StopCheck
from grpo_cli.rollout.sampling import sample_seed
from grpo_cli.types import Completion, Group, PolicyVersion, Prompt, Sampling, SyncReport
from grpo_cli.vision.processor import VisionProcessor


class LocalEngine:
    """Samples from a transformers causal or vision-language model. See `RolloutEngine`.

    Log-probabilities are float32 and those of the model as it runs here: on the same weights in float32 they agree with a forward
    over the whole sequence to about 1e-5; in bfloat16 the two forwards round differently, to about 1e-2.

    When memory runs out, half as many completions are sampled at once from then on, down to one.

    Args:
        model: The policy, not wrapped for distributed training. It samples in evaluation mode and in the caller's autocast.
        tokenizer: Decodes completions.
        max_num_seqs: Most completions that are sampled at once; bounds memory. In float32 it does not change what is sampled; in
            types of less precision rounding depends on the number of rows, and may tip a token.
        max_cached_tokens: Most prompt and completion tokens whose keys and values are held at once, as long as that lets one
            completion be sampled; None: as many as `max_num_seqs` completions need.
        on_progress: Called after every decoding step with the number of tokens it added; with a negative number when memory ran
            out and tokens must be sampled again.
        on_notice: Told once, in a line, of each thing that makes sampling slower than it could be: at once of what the model is,
            in a call of a window that is too short for it, or of memory that ran out.
        share_prefix: Whether a prompt may be held once for its group; otherwise the model's own cache is used.
        vision: Prepares the images of prompts, each of which is encoded once for its group; None: there are none.

    Attributes:
        weight_copies: 0: it samples from the trainer's own.
        notices: What `on_notice` was told.
    """

    weight_copies = 0

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_num_seqs: int,
        max_cached_tokens: int | None = None,
        on_progress: Callable[[int], None] | None = None,
        on_notice: Callable[[str], None] | None = None,
        share_prefix: bool = True,
        vision: VisionProcessor | None = None,
    ) -> None:
        assert max_num_seqs >= 1, max_num_seqs
        self._model = model
        self._vision = vision
        self._tokenizer = tokenizer
        self._max_num_seqs = max_num_seqs
        self._max_cached_tokens = max_cached_tokens
        self._on_progress = on_progress
        self._version = PolicyVersion(0)
        self._on_notice = on_notice
        self.notices: list[str] = []
        self._shares_prefix = share_prefix
        self._window = window_of(model)
        self._flash = flash.has_kernel(self._device)
        if share_prefix:
            self._check()

    def _check(self) -> None:
        """Choose the fastest way to sample that is right for the model."""
        with evaluating(self._model):
            reason = obstacle(self._model, self._vision, flash=self._flash)
            if reason is not None and self._flash:
                self._flash = False
                without = obstacle(self._model, self._vision, flash=False)
                if without is None:
                    self._notice(
                        f"{type(self._model).__name__}: completions are sampled without the flash kernel: {reason}"
                    )
                reason = without
        if reason is not None:
            self._shares_prefix = False
            self._notice_own_cache(reason)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        seed_key: tuple[int | str, ...],
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """Sample `num_generations` completions for each prompt. See `RolloutEngine.generate`."""
        rows = [
            Row(number=number, index=index, seed=sample_seed(seed_key, prompt.uid, index))
            for number, prompt in enumerate(prompts)
            for index in range(num_generations)
        ]
        lengths = [len(prompt.ids) for prompt in prompts]
        # Prompts of similar length go together, for little padding; the longest first, so that too little memory shows early.
        unfinished = sorted(rows, key=lambda row: lengths[row.number], reverse=True)
        finished = FinishedGroups(prompts, rows, close=self._group, on_group=on_group)
        while unfinished:
            slots = min(self._max_num_seqs, len(unfinished))
            with evaluating(self._model), packed_linears(self._model):
                enough = self._sample(unfinished, finished, sampling, slots)
            unfinished = [row for row in unfinished if row.finish_reason is None]
            if not enough:
                self._start_again(unfinished, slots)
        trim_heap(self._device)
        return finished.all()

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> SyncReport:  # noqa: ARG002  shared
        """Take the version number; the weights are the trainer's own."""
        self._version = version
        return SyncReport(version=version, bytes=0)

    def rest(self) -> None:
        """Do nothing: what a call took is free when it returns."""

    def close(self) -> None:
        """Do nothing: the engine holds nothing of its own between two calls."""

    def _sample(self, rows: Sequence[Row], finished: FinishedGroups, sampling: Sampling, slots: int) -> bool:
        """Sample rows until all have finished or memory runs out; returns whether there was enough of it.

        Nothing of what filled the memory outlives this call.
        """
        prompts = [prompt.ids for prompt in finished.prompts]
        try:
            with self._decoding(finished.prompts, sampling, slots) as decoder:
                RowSampler(
                    decoder,
                    sampling,
                    stops=StopCheck(self._tokenizer, sampling),
                    prompts=prompts,
                    slots=slots,
                    max_cached_tokens=self._max_cached_tokens,
                    on_progress=self._report,
                    on_finished=finished.add,
                ).run(rows)
        except (RuntimeError, MemoryError) as error:
            if slots == 1 or not is_out_of_memory(error):
                raise
            return False
        return True

    @contextmanager
    def _decoding(self, prompts: Sequence[Prompt], sampling: Sampling, slots: int) -> Iterator[Decoder]:
        """Give the fastest decoder that is right for the model and for sequences of this length."""
        images = self._images_of(prompts)
        ids = [prompt.ids for prompt in prompts]
        longest = max(len(prompt) for prompt in ids) + sampling.max_tokens
        fits = self._window is None or longest <= self._window
        if self._shares_prefix and fits:
            with attending_by_groups(self._model):
                yield GroupDecoder(
                    self._model, ids, slots=slots, max_tokens=sampling.max_tokens, images=images, flash=self._flash
                )
            return
        if self._shares_prefix:
            self._notice_own_cache(f"some of its layers see {self._window:,} tokens, not all of a longer sequence")
        yield CacheDecoder(self._model, ids, images)

    def _images_of(self, prompts: Sequence[Prompt]) -> PromptImages | None:
        """Give the images of a call's prompts; None if there are none."""
        if not any(prompt.images for prompt in prompts):
            return None
        assert self._vision is not None
        return PromptImages(model=self._model, prompts=prompts, vision=self._vision)

    def _notice_own_cache(self, reason: str) -> None:
        """Say once why the model is sampled with its own cache."""
        self._notice(
            f"{type(self._model).__name__}: completions are sampled with the model's own cache, "
            f"in rows that begin together: {reason}"
        )

    def _notice(self, line: str) -> None:
        """Tell something once."""
        if line in self.notices:
            return
        self.notices.append(line)
        if self._on_notice is not None:
            self._on_notice(line)

    def _start_again(self, rows: Sequence[Row], slots: int) -> None:
        """Halve the rows that are sampled at once, and let those that were being sampled begin anew."""
        self._max_num_seqs = slots // 2
        self._notice(
            f"out of memory while sampling: from here on {self._max_num_seqs} completions are sampled at once at most "
            "(generation.max_num_seqs)"
        )
        self._report(-sum(len(row.ids) for row in rows))
        for row in rows:
            row.restart()
        release_unused(self._device)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._model.get_input_embeddings().weight.device
        return device

    def _report(self, tokens: int) -> None:
        """Report progress."""
        if self._on_progress is not None:
            self._on_progress(tokens)

    def _group(self, prompt: Prompt, rows: Sequence[Row]) -> Group:
        """Make the group of a prompt of its rows, all of which have finished."""
        texts = self._tokenizer.batch_decode([row.ids for row in rows], skip_special_tokens=True)
        completions = []
        for row, text in zip(rows, texts, strict=True):
            assert row.finish_reason is not None
            completions.append(
                Completion(
                    index=row.index,
                    ids=tuple(row.ids),
                    logps=torch.tensor(row.logps, dtype=torch.float32),
                    text=text,
                    finish_reason=row.finish_reason,
                    policy_version=self._version,
                )
            )
        return Group(prompt=prompt, completions=tuple(completions))
