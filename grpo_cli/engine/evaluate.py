"""`grpo eval`: models evaluated on a recipe's datasets, one after another, and compared."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_cli import __version__
from grpo_cli.device_memory import release_unused
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.evaluated_model import EvaluatedModel
from grpo_cli.engine.evaluation import plain_numbers, scored
from grpo_cli.engine.evaluation_identity import sampled_with, scored_with
from grpo_cli.engine.evaluation_keeping import Keeping
from grpo_cli.engine.evaluation_policy import LoadedForSampling, load_for_sampling, open_sampler
from grpo_cli.engine.evaluation_store import EvaluationStore
from grpo_cli.engine.held_out import HeldOut, load_all_held_out, load_scorers
from grpo_cli.engine.inputs import SamplingInputs
from grpo_cli.engine.libraries import quiet_libraries
from grpo_cli.engine.randomness import own_randomness
from grpo_cli.engine.rewards import failed_too_often
from grpo_cli.engine.run_directory import locked
from grpo_cli.engine.shared_scoring import Scorer
from grpo_cli.engine.signals import StopSignals
from grpo_cli.engine.strategies.replicas import Replicas
from grpo_cli.engine.vision import VisionLoader
from grpo_cli.engine.weight_sync import WeightSync
from grpo_cli.errors import DiskError, Interrupted, TrainingError
from grpo_cli.evaluation.intervals import CONFIDENCE
from grpo_cli.evaluation.question import Results, answered
from grpo_cli.evaluation.report import compared, dataset_report
from grpo_cli.policy.load import load_tokenizer
from grpo_cli.recipe.eval_tasks import evaluation_tasks
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import VllmSection
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.telemetry.completions import completion_table
from grpo_cli.telemetry.console import open_console
from grpo_cli.telemetry.evaluation_tables import print_evaluations
from grpo_cli.telemetry.evaluation_view import EvaluationView
from grpo_cli.telemetry.files import disk_errors, write_whole
from grpo_cli.types import PolicyVersion, Prompt, Sampling

PROBLEMS_SHOWN = 5
"""Of a dataset's reward functions, one line each."""

COMPLETIONS_AT_ONCE = 4096
"""That an engine is asked for in one call, which holds all of them until the last is complete."""

END_OF_RUN = TrainerState(global_step=1, max_steps=1, epoch=1.0, progress=1.0)
"""What reward functions are told, for there is no run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The evaluation of one model.

    Attributes:
        document: What eval.json holds.
        results: By dataset.
    """

    document: Mapping[str, Any]
    results: Mapping[str, Results]


def evaluate(loaded: LoadedRecipe, models: Sequence[EvaluatedModel], *, output: Path, overwrite: bool) -> None:
    """Evaluate models, compare all others with the first one, and tell it.

    What was evaluated before with the same settings, by this or a killed command, is not done again.

    Args:
        loaded: A recipe with held-out rows.
        models: From `evaluated_models`.
        output: Folder of all results; each model has one of its own in it, by its label.
        overwrite: Whether older results are removed first.

    Raises:
        GrpoError: If an evaluation cannot be made; what is sampled so far is kept.
        Interrupted: After a signal; the same.
    """
    quiet_libraries()
    _check_engine(loaded.recipe.vllm)
    processes = Processes(bf16=loaded.recipe.train.bf16)
    console = open_console()
    view = EvaluationView(console)
    found: dict[str, Evaluated] = {}
    with ExitStack() as stack, _telling_what_is_kept(view, overwrite=overwrite):
        signals = stack.enter_context(StopSignals())
        stack.callback(view.close)
        with signals.interruptible():
            stack.enter_context(locked(output, key="--output"))
            if overwrite:
                _clear(loaded, models, output)
            for notice in loaded.notices:
                if notice.startswith("eval."):  # the others are about training
                    view.say(notice)
            scorers = load_scorers(loaded, processes)
            for scorer in {id(one): one for one in scorers}.values():
                stack.callback(scorer.close)
                for description in scorer.descriptions:
                    view.say(description)
            for model in models:
                place = output / model.label
                found[model.label] = _evaluate_model(
                    loaded, model, scorers, processes=processes, folder=place, view=view
                )
                release_unused(processes.device)  # of a model that nobody holds any more
            comparison = _compare(found, seed=loaded.recipe.train.seed)
            if len(found) > 1:
                _write_json(output / "comparison.json", comparison)
            else:  # one of an earlier command says nothing about these results
                with disk_errors(output / "comparison.json", doing="remove"):
                    (output / "comparison.json").unlink(missing_ok=True)
    print_evaluations(console, [one.document for one in found.values()], comparison["differences"])
    view.say(f"results: {', '.join(str(output / label / 'eval.json') for label in found)}")


def _check_engine(vllm: VllmSection) -> None:
    """Refuse an engine that is spread over processes: there is one."""
    if vllm.mode == "colocate" and vllm.tensor_parallel_size > 1:
        raise TrainingError(
            f"vllm.tensor_parallel_size: found {vllm.tensor_parallel_size} with vllm.mode: colocate, but `grpo eval` is one process; "
            "allowed: 1",
            hint="vllm.mode=server vllm.start=true spreads an engine over GPUs",
        )


def _clear(loaded: LoadedRecipe, models: Sequence[EvaluatedModel], output: Path) -> None:
    """Remove older results of all models before any is evaluated: from here on, the command without --overwrite goes on."""
    for folder in (output / model.label for model in models):
        with disk_errors(folder / "eval.json", doing="remove"):
            (folder / "eval.json").unlink(missing_ok=True)
        for task in evaluation_tasks(loaded.recipe):
            EvaluationStore(folder=folder / task.label).clear()


@contextmanager
def _telling_what_is_kept(view: EvaluationView, *, overwrite: bool) -> Iterator[None]:
    """Say after a signal, or if the disk is full, that nothing is lost."""
    command = "the same command without --overwrite" if overwrite else "the same command"
    try:
        yield
    except Interrupted:
        view.say(f"what was sampled is kept: {command} goes on with it")
        raise
    except DiskError as error:
        hint = f"make room, or name a folder that can be written to with --output; what was sampled is kept: {command} goes on"
        raise DiskError(error.message, hint=hint) from error


def _evaluate_model(
    loaded: LoadedRecipe,
    model: EvaluatedModel,
    scorers: Sequence[Scorer],
    *,
    processes: Processes,
    folder: Path,
    view: EvaluationView,
) -> Evaluated:
    """Evaluate one model on all datasets."""
    recipe = dataclasses.replace(loaded.recipe, model=model.section)
    loaded = dataclasses.replace(loaded, recipe=recipe)
    view.say(f"{model.label}: {model.name}")
    tokenizer = load_tokenizer(recipe.model, folder=loaded.folder)
    vision = VisionLoader(recipe.model, folder=loaded.folder)
    held_out = load_all_held_out(loaded, tokenizer, vision, scorers)
    inputs = SamplingInputs(
        recipe=recipe,
        folder=loaded.folder,
        output_dir=folder,
        processes=processes,
        strategy=Replicas(processes),
        tokenizer=tokenizer,
        vision=vision.loaded,
        held_out=held_out,
    )
    for line in (line for one in inputs.held_out for line in one.lines):
        view.say(line)
    with ExitStack() as stack:
        policy = load_for_sampling(inputs, adapters=model.adapters, say=view.say)
        stores = [EvaluationStore(folder=folder / one.task.label) for one in inputs.held_out]
        for store, one, sampling in zip(stores, inputs.held_out, policy.samplings, strict=True):
            store.claim(sampled_with(inputs, policy, one, sampling))
        _complete(inputs, policy, stores, stack, view)
        return _evaluated(inputs, policy, stores, name=model.name, label=model.label)


def _complete(
    inputs: SamplingInputs,
    policy: LoadedForSampling,
    stores: Sequence[EvaluationStore],
    stack: ExitStack,
    view: EvaluationView,
) -> None:
    """Sample and score what is missing; the engine is not started for nothing."""
    weight_sync: WeightSync | None = None
    for store, held_out, sampling in zip(stores, inputs.held_out, policy.samplings, strict=True):
        changed = store.changed_scoring(scored_with(held_out))
        if changed == []:
            view.say(f"{held_out.task.label}: evaluated before, {store.completions_path}")
            continue
        if changed is not None:
            view.say(f"{held_out.task.label}: the kept completions are scored again, with another {', '.join(changed)}")
        kept = store.kept()
        missing = [prompt for prompt in held_out.prompts if prompt.uid not in kept]
        if missing and weight_sync is None:
            weight_sync = open_sampler(inputs, policy, view, stack)
        view.begin(held_out.task.label, total=len(held_out.prompts))
        view.sampled(len(held_out.prompts) - len(missing))
        if missing and weight_sync is not None:
            _sample(inputs, held_out, sampling, missing, weight_sync, Keeping(store, view))
        if weight_sync is not None:
            weight_sync.rest()
        _score(inputs, held_out, store, view)


def _sample(
    inputs: SamplingInputs,
    held_out: HeldOut,
    sampling: Sampling,
    prompts: Sequence[Prompt],
    weight_sync: WeightSync,
    keeping: Keeping,
) -> None:
    """Sample what is missing; what is complete is kept however this ends."""
    seed, count = inputs.recipe.train.seed, held_out.task.settings.num_generations
    at_once = max(1, COMPLETIONS_AT_ONCE // count)
    with own_randomness(seed), closing(keeping):
        for start in range(0, len(prompts), at_once):
            weight_sync.sample(
                PolicyVersion(0),
                prompts[start : start + at_once],
                sampling,
                num_generations=count,
                seed_key=held_out.seed_key(seed),
                on_group=keeping.add,
            )


def _score(inputs: SamplingInputs, held_out: HeldOut, store: EvaluationStore, view: EvaluationView) -> None:
    """Score all completions of a dataset in one call, so that rewards that look at several of them see all."""
    groups = store.read(held_out.prompts, inputs.tokenizer)
    view.close()
    with own_randomness(inputs.recipe.train.seed):
        scores = scored(held_out, groups, END_OF_RUN)
        table = held_out.with_answers(completion_table(scores.groups, held_out.scorer.names, step=0))
    for problem in scores.problems[:PROBLEMS_SHOWN]:
        view.warn(problem)
    if len(scores.problems) > PROBLEMS_SHOWN:
        view.warn(
            f"{held_out.task.label}: {len(scores.problems) - PROBLEMS_SHOWN:,} more problems with reward functions"
        )
    rewards = held_out.task.rewards
    if failed_too_often(scores.failed_prompts, len(groups), rewards.failure_budget):
        raise TrainingError(
            f"{held_out.task.label}: a reward function failed on {scores.failed_prompts} of {len(groups)} prompts; `rewards.failure_budget` allows less "
            f"than {rewards.failure_budget:g} of them",
            hint=f"the completions are kept: the same command scores them again, with other rewards too. {'; '.join(scores.problems[:1])}",
        )
    numbers = plain_numbers(held_out, scores)
    store.write_completions(
        table.drop_columns(["step", "policy_version"]),
        {name: value for name, value in numbers.items() if not name.startswith("time/")},
        scored_with=scored_with(held_out),
    )


def _evaluated(
    inputs: SamplingInputs, policy: LoadedForSampling, stores: Sequence[EvaluationStore], *, name: str, label: str
) -> Evaluated:
    """Compute the numbers of what is on disk, and write eval.json."""
    seed = inputs.recipe.train.seed
    results: dict[str, Results] = {}
    reports: dict[str, Any] = {}
    for store, held_out, sampling in zip(stores, inputs.held_out, policy.samplings, strict=True):
        completions = store.read_completions()
        assert completions is not None
        table, numbers = completions
        found = answered(held_out.sheet(table), held_out.question())
        report = dataset_report(found, seed=seed)
        others = {key: value for key, value in numbers.items() if key not in found.metrics}
        results[held_out.task.label] = found
        reports[held_out.task.label] = {**report, "others": others, "sampling": dataclasses.asdict(sampling)}
    document = {
        "label": label,
        "model": name,
        "weights": policy.checksum,
        "recipe": inputs.recipe.run_name,
        "seed": seed,
        "confidence": CONFIDENCE,
        "versions": {"grpo": __version__, "torch": torch.__version__},
        "datasets": reports,
    }
    _write_json(inputs.output_dir / "eval.json", document)
    return Evaluated(document=document, results=results)


def _compare(found: Mapping[str, Evaluated], *, seed: int) -> dict[str, Any]:
    """Compare all models with the first."""
    baseline, *others = found
    return {
        "baseline": baseline,
        "confidence": CONFIDENCE,
        "differences": {
            label: {
                dataset: compared(ours, found[baseline].results[dataset], seed=seed)
                for dataset, ours in found[label].results.items()
            }
            for label in others
        },
    }


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document. NaN, which JSON does not have, becomes null."""
    text = json.dumps(_without_nan(document), indent=1, allow_nan=False)
    write_whole(path, f"{text}\n".encode())


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and value != value else value  # noqa: PLR0124  NaN differs from itself
