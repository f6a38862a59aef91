"""A whole run, from a checked recipe to the last line on the console."""

import dataclasses
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from grpo_cli.engine.build import LoadedPolicy, build_stages, load_policy
from grpo_cli.engine.continued import begun_adapters
from grpo_cli.engine.distributed import Processes, telling_of_lost_processes
from grpo_cli.engine.division import count_engines
from grpo_cli.engine.export import restore
from grpo_cli.engine.handing_out import own_share
from grpo_cli.engine.held_out import load_all_held_out, load_scorers
from grpo_cli.engine.inputs import Inputs
from grpo_cli.engine.libraries import quiet_libraries
from grpo_cli.engine.named_parts import check_named_parts
from grpo_cli.engine.plan import run_plan
from grpo_cli.engine.prompts import load_prompts
from grpo_cli.engine.randomness import RandomState, seed_everything
from grpo_cli.engine.resume import Resumed, find_resumed
from grpo_cli.engine.rewards import load_scorer
from grpo_cli.engine.run_directory import locked, refuse_to_overwrite, remove_run
from grpo_cli.engine.run_length import run_length
from grpo_cli.engine.settings import loop_settings
from grpo_cli.engine.signals import StopSignals
from grpo_cli.engine.state import RunState
from grpo_cli.engine.strategies.choice import choose_strategy
from grpo_cli.engine.trainer import Trainer
from grpo_cli.engine.vision import VisionLoader
from grpo_cli.parent_death import signal_at_parents_death
from grpo_cli.policy.load import load_tokenizer
from grpo_cli.recipe.load import LoadedRecipe, dump_recipe
from grpo_cli.telemetry.console import open_console, open_view
from grpo_cli.telemetry.files import disk_errors
from grpo_cli.telemetry.plan import print_plan
from grpo_cli.telemetry.recorder import Recorder, RunSummary
from grpo_cli.telemetry.silent import SilentRecorder
from grpo_cli.telemetry.trackers import require_trackers
from grpo_cli.types import PolicyVersion


@telling_of_lost_processes()
def run(loaded: LoadedRecipe, *, resume: str | None = None) -> Path:
    """Train as a recipe says.

    Nothing of an older run is touched before everything of this one is loaded.

    Args:
        loaded: The recipe.
        resume: What `--resume` said: `newest`, a path, or None for a run from the beginning.

    Returns:
        The folder of the final model.

    Raises:
        GrpoError: If the run cannot start or cannot go on.
        Interrupted: After a signal; the state is saved.
    """
    began, launcher = time.monotonic(), os.getppid()
    quiet_libraries()
    recipe = loaded.recipe
    processes = Processes(bf16=recipe.train.bf16)
    # Told before anything is loaded, and before processes wait for each other in vLLM.
    processes.check_same(dataclasses.asdict(recipe.vllm), "settings of vLLM in its recipe")
    count_engines(recipe.vllm, processes.count)
    console = open_console(quiet=not processes.is_main)
    require_trackers(recipe.logging.report_to)
    output_dir = Path(recipe.train.output_dir).expanduser().resolve()
    with ExitStack() as stack:
        signals = _listen(processes, launcher, stack)
        with signals.interruptible():
            exists = output_dir.is_dir()
            if exists and processes.is_main:
                stack.enter_context(locked(output_dir))
            resumed = find_resumed(loaded, output_dir, resume, lambda line: _tell(console, line))
            loaded, recipe = resumed.loaded, resumed.loaded.recipe
            if not resumed.continues and not recipe.train.overwrite_output_dir:
                refuse_to_overwrite(output_dir)
            inputs = _load_inputs(loaded, output_dir, resumed, processes, console)
            for scorer in {
                id(one): one for one in (inputs.scorer, *(each.scorer for each in inputs.held_out))
            }.values():
                stack.callback(scorer.close)
            recorder = _open_recorder(inputs, console)
            stack.callback(recorder.close)
            trainer = _build_trainer(inputs, load_policy(inputs), resumed.state, recorder, signals, stack)
            resumed = dataclasses.replace(resumed, state=None)  # of a window, a process keeps no more than its share
            _check_agreement(trainer, inputs)
        if processes.is_main and not exists:
            stack.enter_context(locked(output_dir))
            refuse_to_overwrite(output_dir)  # another run may have come and gone while this one was loading
        _take_directory(trainer, inputs, resumed)
        print_plan(console, run_plan(inputs, trainer.stages, done_steps=trainer.state.step))
        final: Path | None = None
        try:
            final = trainer.run()
            return final
        finally:
            if trainer.state.step > 0:  # before that there is nothing to sum up: the error says it all
                recorder.finish(_summary(trainer, final, seconds=time.monotonic() - began))


def _listen(processes: Processes, launcher: int, stack: ExitStack) -> StopSignals:
    """Turn signals into `Interrupted` until the run ends."""
    # Slurm, too: what it sends at preemption comes beside what the batch script sends.
    passed_on = processes.count > 1 or "SLURM_STEP_ID" in os.environ
    signals = stack.enter_context(StopSignals(passed_on=passed_on))
    # A launcher that was killed passes nothing on, and nobody would end this process.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_at_parents_death(signal.SIGTERM, parent=launcher)
    return signals


def _load_inputs(
    loaded: LoadedRecipe, output_dir: Path, resumed: Resumed, processes: Processes, console: Console
) -> Inputs:
    """Load everything but the model."""
    recipe, folder, seed = loaded.recipe, loaded.folder, loaded.recipe.train.seed
    check_named_parts(recipe, folder=folder, begun=begun_adapters(recipe, folder, checkpoint=resumed.checkpoint))
    seed_everything(seed)
    strategy = choose_strategy(recipe, folder=folder, processes=processes, say=lambda line: _tell(console, line))
    scorer = load_scorer(recipe.rewards, loaded, processes)
    tokenizer = load_tokenizer(recipe.model, folder=folder)
    vision = VisionLoader(recipe.model, folder=folder)
    prompts = load_prompts(recipe.dataset, tokenizer, vision=vision, folder=folder, seed=seed)
    scorer.check_columns(prompts.first.row)
    held_out = load_all_held_out(loaded, tokenizer, vision, load_scorers(loaded, processes, scorer))
    evaluations = [line for one in held_out for line in one.lines]
    for line in (*loaded.notices, *prompts.lines, *evaluations, *scorer.descriptions):
        _tell(console, line)
    return Inputs(
        recipe=recipe,
        folder=folder,
        output_dir=output_dir,
        checkpoint=resumed.checkpoint,
        processes=processes,
        strategy=strategy,
        tokenizer=tokenizer,
        vision=vision.loaded,
        prompts=prompts,
        held_out=held_out,
        scorer=scorer,
        length=run_length(recipe.train, recipe.grpo, rows=prompts.source.rows_per_epoch, done=resumed.done),
    )


def _open_recorder(inputs: Inputs, console: Console) -> Recorder:
    """Make what the run is told to; it writes nothing before it is told something."""
    kind = Recorder if inputs.processes.is_main else SilentRecorder
    return kind(
        output_dir=inputs.output_dir,
        settings=inputs.recipe.logging,
        view=open_view(console, inputs.length.total_steps),
        reward_names=inputs.scorer.names,
        run_name=inputs.recipe.run_name,
        recipe=dataclasses.asdict(inputs.recipe),
    )


def _build_trainer(
    inputs: Inputs,
    policy: LoadedPolicy,
    resumed: RunState | None,
    recorder: Recorder,
    signals: StopSignals,
    stack: ExitStack,
) -> Trainer:
    """Build the stages, and put them where the checkpoint left them."""
    recipe = inputs.recipe
    stages = build_stages(inputs, policy, recorder, stack)
    state = RunState(random=RandomState.capture())
    if resumed is not None and inputs.checkpoint is not None:
        state = resumed
        restore(stages, state, inputs.checkpoint)
        if state.window is not None:
            whole = state.window if inputs.processes.is_main else None
            state = dataclasses.replace(state, window=own_share(state.window, stages.gradients), whole_window=whole)
        best = state.best
        if best is not None and (
            best.metric != recipe.eval.best_metric or not stages.checkpoints.path(best.step).is_dir()
        ):
            state = dataclasses.replace(state, best=None)
    stages.weight_sync.bring(PolicyVersion(state.step))  # an engine that cannot take them should say so now
    for notice in policy.notices:
        recorder.say(notice)
    if state.step >= inputs.length.total_steps:
        recorder.say(
            f"{state.step} steps are done and the recipe asks for {inputs.length.total_steps}: nothing is left to train"
        )
    settings = loop_settings(recipe, output_dir=inputs.output_dir, length=inputs.length)
    return Trainer(stages, settings, state, signals)


def _check_agreement(trainer: Trainer, inputs: Inputs) -> None:
    """Check that the processes do the same run. After it, nobody reads any more what the main one removes."""
    gradients = trainer.stages.gradients
    forward = {"shares_prefix": gradients.shares_prefix, "splits_prompts": gradients.splits_prompts}
    inputs.processes.check_same(dataclasses.asdict(inputs.recipe), "settings in its recipe")
    inputs.processes.check_same({**forward, "step": trainer.state.step}, "ways to compute, or another checkpoint,")
    inputs.processes.check_same(trainer.stages.prompts.state_dict(), "prompts")


def _take_directory(trainer: Trainer, inputs: Inputs, resumed: Resumed) -> None:
    """Make the run directory this run's. From here on, what an older run left there is gone."""
    if not inputs.processes.is_main:
        return
    output_dir, state, stages = inputs.output_dir, trainer.state, trainer.stages
    with disk_errors(output_dir):
        if not resumed.continues:
            remove_run(output_dir)
        (output_dir / "recipe.yaml").write_text(dump_recipe(inputs.recipe), encoding="utf-8")
    if resumed.continues or resumed.checkpoint is not None:
        stages.recorder.resume_at(state.step, evaluated=state.evaluated)
    stages.checkpoints.start_from(state.step, best=state.best)


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


def _tell(console: Console, line: str) -> None:
    """Print a line as it is: text of a user's, and not broken at the width of a terminal that may not be there."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
