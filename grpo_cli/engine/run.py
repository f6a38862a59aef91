"""A whole run, from a checked recipe to the last line on the console."""

import dataclasses
import logging
import time
from pathlib import Path

from datasets import disable_progress_bars
from rich.console import Console
from transformers.utils import logging as transformers_logging

from grpo_cli.engine.build import Inputs, build_stages, loop_settings
from grpo_cli.engine.checkpoint_store import CheckpointStore
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.export import restore
from grpo_cli.engine.plan import run_plan
from grpo_cli.engine.prompts import load_evaluation_prompts, load_prompts
from grpo_cli.engine.randomness import RandomState, seed_everything
from grpo_cli.engine.run_directory import checkpoint_to_resume, start_fresh
from grpo_cli.engine.run_length import run_length
from grpo_cli.engine.state import RunState, read_state
from grpo_cli.engine.trainer import Trainer
from grpo_cli.policy.load import load_tokenizer
from grpo_cli.recipe.load import LoadedRecipe, dump_recipe
from grpo_cli.scoring.functions import load_rewards
from grpo_cli.scoring.runtime import RewardScorer
from grpo_cli.telemetry.console import open_console, open_view
from grpo_cli.telemetry.plan import print_plan
from grpo_cli.telemetry.recorder import Recorder, RunSummary
from grpo_cli.telemetry.trackers import require_trackers
from grpo_cli.types import PolicyVersion


def run(loaded: LoadedRecipe, *, resume: str | None = None) -> Path:
    """Train as a recipe says.

    Args:
        loaded: The recipe.
        resume: What `--resume` said: `newest`, a path, or None for a run from the beginning.

    Returns:
        The folder of the final model.

    Raises:
        GrpoError: If the run cannot start or cannot go on.
        Interrupted: After a signal; the state is saved.
    """
    began = time.monotonic()
    console = open_console()
    _quiet_libraries()
    require_trackers(loaded.recipe.logging.report_to)
    inputs = _load_inputs(loaded, resume, console)
    recorder = _open_recorder(inputs, console)
    try:
        trainer = _build_trainer(inputs, recorder, console)
        final: Path | None = None
        try:
            final = trainer.run()
            return final
        finally:
            recorder.finish(_summary(trainer, final, seconds=time.monotonic() - began))
    finally:
        inputs.scorer.close()
        recorder.close()


def _load_inputs(loaded: LoadedRecipe, resume: str | None, console: Console) -> Inputs:
    """Load everything but the model, and decide where to begin."""
    recipe = loaded.recipe
    output_dir = Path(recipe.train.output_dir).expanduser().absolute()
    checkpoint = None
    if resume is not None:
        store = CheckpointStore(output_dir / "checkpoints", keep=recipe.train.keep_checkpoints)
        checkpoint = checkpoint_to_resume(resume, store, lambda line: console.print(line, markup=False))
        if checkpoint is None:
            console.print(f"no complete checkpoint in {store.folder}: starting from the beginning", markup=False)
    seed_everything(recipe.train.seed)
    processes = Processes(bf16=recipe.train.bf16)
    rewards = load_rewards(
        recipe.rewards, folder=loaded.folder, device=processes.device, trust_remote_code=recipe.model.trust_remote_code
    )
    scorer = RewardScorer(rewards, on_error=recipe.rewards.on_error)
    tokenizer = load_tokenizer(recipe.model, folder=loaded.folder)
    prompts = load_prompts(recipe, tokenizer, folder=loaded.folder)
    scorer.check_columns(prompts.first.row)
    evaluation_prompts = load_evaluation_prompts(recipe, tokenizer, folder=loaded.folder)
    for line in prompts.lines:
        console.print(line, markup=False, highlight=False)
    length = run_length(recipe.train, recipe.grpo, rows=prompts.source.rows_per_epoch)
    continues = resume is not None and (checkpoint is None or checkpoint.is_relative_to(output_dir))
    if continues:
        output_dir.mkdir(parents=True, exist_ok=True)
    else:  # only now that the recipe is known to work may an older run be removed
        start_fresh(output_dir, overwrite=recipe.train.overwrite_output_dir)
    (output_dir / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    return Inputs(
        recipe=recipe,
        folder=loaded.folder,
        output_dir=output_dir,
        checkpoint=checkpoint,
        resumed=resume is not None,
        processes=processes,
        tokenizer=tokenizer,
        prompts=prompts,
        evaluation_prompts=evaluation_prompts,
        scorer=scorer,
        length=length,
    )


def _open_recorder(inputs: Inputs, console: Console) -> Recorder:
    """Open what the run is told to."""
    return Recorder(
        output_dir=inputs.output_dir,
        settings=inputs.recipe.logging,
        view=open_view(console, inputs.length.total_steps),
        reward_names=inputs.scorer.names,
        run_name=inputs.recipe.run_name,
        recipe=dataclasses.asdict(inputs.recipe),
    )


def _build_trainer(inputs: Inputs, recorder: Recorder, console: Console) -> Trainer:
    """Build the stages, and put them where the checkpoint left them."""
    stages = build_stages(inputs, recorder)
    state = RunState(random=RandomState.capture())
    if inputs.checkpoint is not None:
        state = read_state(inputs.checkpoint)
        restore(stages, state, inputs.checkpoint)
    if inputs.resumed:
        recorder.resume_at(state.step, evaluated=state.evaluated)
        stages.checkpoints.remove_after(state.step)
        stages.checkpoints.mark_best(state.best)
    stages.rollouts.sync(stages.processes.named_weights(stages.policy), PolicyVersion(state.step))
    print_plan(console, run_plan(inputs, stages, done_steps=state.step))
    settings = loop_settings(inputs.recipe, output_dir=inputs.output_dir, length=inputs.length)
    return Trainer(stages, settings, state)


def _summary(trainer: Trainer, final: Path | None, *, seconds: float) -> RunSummary:
    """Say how far the run came."""
    checkpoints = trainer.stages.checkpoints
    best = checkpoints.best
    return RunSummary(
        steps_done=trainer.state.step,
        total_steps=trainer.settings.total_steps,
        seconds=seconds,
        final_model=final,
        best_checkpoint=None if best is None else checkpoints.path(best.step),
    )


def _quiet_libraries() -> None:
    """Keep progress bars and notices of libraries out of the console; their errors still come as exceptions."""
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
