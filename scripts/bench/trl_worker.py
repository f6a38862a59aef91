"""The measured process of TRL: its real GRPOTrainer with its defaults, taken through one optimizer step at a time.

Set are the things that make it the same step (float32, `beta`, one optimizer step of 4 x 8 completions as four micro-batches of its
default 8) and nothing else: gradient checkpointing stays on, as it is by default. Completions end at given lengths, and the
workload's tokens take the place of the sampled ones.

On CPUs TRL applies its language-model head to every position, prompts and padding included; on GPUs it does so to completion tokens
only. `step` measures it the way it works on a GPU, `all_positions` what the head as it is on a CPU makes of the forwards and backwards.
"""

import dataclasses
import importlib.metadata
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from trl import GRPOConfig, GRPOTrainer

from bench.measure import Meter, multiplication_rates, resident_bytes, weight_bytes
from bench.rewards import letter_share
from bench.worker import serve
from bench.workload import Workload


class ForcedLengths(StoppingCriteria):  # type: ignore[misc]  # transformers is not typed
    """Ends each row at its length."""

    def __init__(self, lengths: list[int], prompt_tokens: int) -> None:
        self._ends = torch.tensor(lengths) + prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **arguments: Any) -> Tensor:
        """Tell which rows end here."""
        del scores, arguments
        return input_ids.shape[1] >= self._ends


class WholeStep(TrainerCallback):  # type: ignore[misc]
    """Measures from the first micro-batch, which generates, to after the optimizer."""

    def __init__(self, meter: Meter) -> None:
        self._part = meter.part("whole_step")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin to measure."""
        self._part.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop measuring."""
        self._part.__exit__(None, None, None)


class MeasuredTrainer(GRPOTrainer):  # type: ignore[misc]  # its package lives in another environment
    """The trainer, its parts measured. Nothing is computed otherwise."""

    meter: Meter

    def _generate(self, prompts: list[str]) -> Any:
        with self.meter.part("generate"):
            return super()._generate(prompts)

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        with self.meter.part("reference"):
            return super()._get_per_token_logps_and_entropies(*arguments, **keywords)

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        """Measure the forward; the backward is accelerate's and measured there."""
        with self.meter.part("train_step"):
            return super().compute_loss(*arguments, **keywords)

    @property
    def micro_batches(self) -> list[dict[str, Tensor]]:
        """The micro-batches of the last step."""
        batches: list[dict[str, Tensor]] = self._buffered_inputs
        return batches

    def repeat_passes(self, batch: dict[str, Tensor]) -> None:
        """Repeat what a step does with a micro-batch: the reference's forward, the policy's forward and backward."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        with torch.no_grad():
            self._get_per_token_logps_and_entropies(
                self.ref_model, ids, attention_mask(batch), batch["completion_ids"].shape[1]
            )
        self.accelerator.backward(self.compute_loss(self.model, batch))


def attention_mask(batch: dict[str, Tensor]) -> Tensor:
    """Tell real tokens from padding in a micro-batch: int [rows, tokens]."""
    return torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


@contextmanager
def compact_head() -> Iterator[None]:
    """Let TRL score completion tokens only, as it does where it has Triton; the tiles themselves stay those of its torch path."""
    with patch("trl.trainer.utils._use_triton", lambda _: True):
        yield


class TrlWorker:
    """The calls that this process answers."""

    def __init__(self) -> None:
        self._trainer: Any = None

    def load(self, *, model: str, workload: dict[str, Any], beta: float, threads: int) -> dict[str, Any]:
        """Load the model and its reference, and tell the memory of the libraries and the weights alone."""
        torch.set_num_threads(threads)
        libraries = resident_bytes()
        shape = Workload(**workload)
        settings = GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-bench-"),
            gradient_accumulation_steps=len(shape.rows) // GRPOConfig.per_device_train_batch_size,
            num_generations=len(shape.completion_ids[0]),
            max_completion_length=shape.longest_completion,
            beta=beta,
            learning_rate=0.0,  # every step is the same
            max_steps=1,
            logging_steps=1,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            use_cpu=True,
        )
        self._trainer = MeasuredTrainer(
            model=model, reward_funcs=letter_share, args=settings, train_dataset=_dataset(shape)
        )
        backward = self._trainer.accelerator.backward
        self._trainer.accelerator.backward = self._measured_backward(backward)
        return {
            "level_bytes": libraries + weight_bytes(self._trainer.model, self._trainer.ref_model),
            "trained_bytes": weight_bytes(self._trainer.model),
        }

    def step(self, *, workload: dict[str, Any]) -> dict[str, Any]:
        """Do one optimizer step, the head applied to completion tokens only."""
        trainer, shape = self._trainer, Workload(**workload)
        trainer.train_dataset = _dataset(shape)
        trainer.meter = Meter()
        callback = WholeStep(trainer.meter)
        trainer.add_callback(callback)
        resident_bytes()
        forced = self._forced_generate(trainer.model.generate, shape)
        with compact_head(), patch.object(trainer.model, "generate", forced):
            trainer.train()
        trainer.remove_callback(callback)
        masks = [attention_mask(batch) for batch in trainer.micro_batches]
        return {
            "parts": _costs(trainer.meter),
            "gradient_norm": next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry),
            "tokens_useful": sum(int(mask.sum()) for mask in masks),
            "tokens_computed": sum(mask.numel() for mask in masks),
        }

    def all_positions(self, *, micro_batches: int) -> dict[str, Any]:
        """Repeat the reference's and the policy's passes of the last step with the head applied to every position.

        All micro-batches of a step are padded to one width, so they all take the same; some of them tell about the rest.

        Args:
            micro_batches: How many of them to run.
        """
        trainer = self._trainer
        trainer.meter = Meter()
        resident_bytes()
        trainer.model.train()
        for batch in trainer.micro_batches[:micro_batches]:
            trainer.repeat_passes(batch)
        trainer.model.zero_grad(set_to_none=True)
        return {"parts": _costs(trainer.meter), "micro_batches": micro_batches, "of": len(trainer.micro_batches)}

    def _measured_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        def measured(*arguments: Any, **keywords: Any) -> None:
            with self._trainer.meter.part("train_step"):
                backward(*arguments, **keywords)

        return measured

    def _forced_generate(self, generate: Callable[..., Tensor], shape: Workload) -> Callable[..., Tensor]:
        """Make a `generate` that does its work for the given lengths, and then returns the workload's tokens."""
        # The end-of-sequence check stays, but looks for a token that does not exist.
        never = self._trainer.model.config.vocab_size
        padding = self._trainer.processing_class.pad_token_id

        def forced(*, input_ids: Tensor, generation_config: Any, **keywords: Any) -> Tensor:
            width = input_ids.shape[1]
            lengths = [len(ids) for ids in shape.rows]
            ends = StoppingCriteriaList([ForcedLengths(lengths, width)])
            with patch.object(generation_config, "eos_token_id", never):
                rows = generate(
                    input_ids=input_ids, generation_config=generation_config, stopping_criteria=ends, **keywords
                )
            assert rows.shape == (len(lengths), width + max(lengths)), "generation did not end where it was told to"
            rows[:, width:] = padding
            for row, ids in zip(rows, shape.rows, strict=True):
                row[width : width + len(ids)] = torch.tensor(ids)
            return rows

        return forced


def _dataset(workload: Workload) -> Dataset:
    """Make a dataset of a workload's prompts."""
    return Dataset.from_dict({"prompt": workload.prompts})


def _costs(meter: Meter) -> dict[str, Any]:
    """Write costs as JSON."""
    return {name: dataclasses.asdict(cost) for name, cost in meter.parts.items()}


if __name__ == "__main__":
    worker = TrlWorker()
    serve(
        {
            "load": worker.load,
            "step": worker.step,
            "all_positions": worker.all_positions,
            "multiplication_rates": multiplication_rates,
            "version": lambda: importlib.metadata.version("trl"),
        }
    )
