"""The loop: prompts, weight sync, rollouts, rewards, advantages, objective, optimizer step, metrics, checkpoint."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from grpo_cli.device_memory import peak_memory
from grpo_cli.engine.checkpoint_store import BestCheckpoint
from grpo_cli.engine.clock import Clock
from grpo_cli.engine.export import save_checkpoint, save_final_model
from grpo_cli.engine.generation import Generation, generate, trainer_state
from grpo_cli.engine.handing_out import brought_together
from grpo_cli.engine.masked import masked_completions
from grpo_cli.engine.randomness import RandomState
from grpo_cli.engine.signals import StopSignals
from grpo_cli.engine.stages import LoopSettings, Stages
from grpo_cli.engine.state import RunState
from grpo_cli.engine.step import StepGradient, gradient_metrics
from grpo_cli.errors import CheckpointError, Interrupted, TrainingError
from grpo_cli.metrics import Max, Mean, Metrics, Min, Sum, merge
from grpo_cli.policy.adapter_dropout import dropped_inputs
from grpo_cli.telemetry.recorder import Evaluation
from grpo_cli.types import PolicyLogps, StepReport


class Trainer:
    """Runs the stages until the run is complete or stopped.

    Between two steps `state` and the stages hold everything; inside a step `_restart` is the state that the step began with, so
    whatever stops it, a checkpoint can be written that the step can be repeated from.

    Args:
        stages: What does the work.
        settings: How far and in which strides.
        state: Where to begin.
        signals: Listens for requests to stop.
    """

    def __init__(self, stages: Stages, settings: LoopSettings, state: RunState, signals: StopSignals) -> None:
        self.stages = stages
        self.settings = settings
        self.state = state
        self._restart: RunState | None = state
        self._signals = signals

    def run(self) -> Path:
        """Train to the end and give the folder of the final model.

        Raises:
            Interrupted: After a signal; the state is saved.
            GrpoError: If the run cannot go on; the state before the failed step is saved.
        """
        try:
            self._evaluate_if_due()
            while self.state.step < self.settings.total_steps:
                self._train_step()
                self._evaluate_if_due()
                self._save_if_due()
        except BaseException:
            self._save_on_the_way_out()
            raise
        return save_final_model(self.stages, self.settings.output_dir / "final")

    def _train_step(self) -> None:
        """Do one optimizer step, tell about it, and commit it to `state`."""
        stages, settings, state = self.stages, self.settings, self.state
        clock = Clock(stages.recorder.phase)
        generation: Generation | None = None
        with self._interruptible():
            window, whole, position = state.window, state.whole_window, state.position
            if window is None:
                generation = generate(stages, settings, state, clock)
                window, position = generation.window, 0
            with clock.phase("forward_backward"):
                stages.weight_sync.rest()  # it may have evaluated since it last did
                groups, logps = window.at(position)
                with dropped_inputs(stages.policy.model, settings.seed, state.step - position):
                    gradient = stages.gradients.accumulate(stages.prepared, groups, logps)
            self._watch_correction(gradient, logps)
            if position == 0 and window.iterations > 1:  # no weight has moved yet: the next passes compare with these
                window = window.with_old(0, gradient.logps())
            if position == 0 and window.length > 1:
                whole = brought_together(window, stages.processes)

        self._restart = None  # from here to the commit, weights and state do not belong together
        with clock.phase("optimizer"):
            step_metrics = self._apply_gradient()
        step = state.step + 1
        if stages.reference is not None:
            stages.reference.mix_if_due(stages.policy, step, parts=stages.strategy.own_parts)
        goes_on = position + 1 < window.length
        self.state = replace(
            state,
            step=step,
            evaluated=False,
            window=window if goes_on else None,
            whole_window=whole if goes_on else None,
            position=(position + 1) % window.length,
            num_tokens=state.num_tokens + (0 if generation is None else generation.tokens),
            prompts_drawn=state.prompts_drawn + (0 if generation is None else generation.prompts),
        )
        sampled_by = window.policy_version
        versions: Metrics = {"policy_version": Max(sampled_by), "staleness": Mean(state.step - sampled_by, 1)}
        self._commit()
        self._record(clock, merge([gradient.metrics, step_metrics, versions, self._memory_metrics()]), generation)

    def _interruptible(self) -> AbstractContextManager[None]:
        """Make the context of work that a signal may cut off, if none of the others waits for this process then.

        Raises:
            Interrupted: If a signal has come, to any process where all have to stop together.
        """
        if not self.stages.strategy.in_step:
            return self._signals.interruptible()
        received = self.stages.processes.most(self._signals.received or 0)
        if received:
            raise Interrupted(received)
        return nullcontext()

    def _watch_correction(self, gradient: StepGradient, logps: Sequence[PolicyLogps]) -> None:
        """Warn if the rollout correction leaves out much of what was sampled."""
        correction = self.stages.gradients.settings.correction
        if correction is None:
            return
        old = [entry.old for entry in logps if entry.old is not None] or gradient.logps()
        masked = masked_completions(gradient.share.groups, gradient.share.active, old, correction)
        for warning in self.stages.health.observe_masked(masked.of_all(self.stages.processes)):
            self.stages.recorder.warn(warning.key, warning.message)

    def _apply_gradient(self) -> Metrics:
        """Clip, step, schedule, and clear the gradient.

        Raises:
            TrainingError: If the gradient is not finite; the weights are as before.
        """
        stages = self.stages
        learning_rate = float(stages.schedule.get_last_lr()[0])
        norm = stages.strategy.apply()
        if not math.isfinite(norm):
            self._restart = self.state
            raise TrainingError(
                f"step {self.state.step + 1}: the gradient is not finite (norm {norm})",
                hint="look at the rewards and completions of the last steps; go back to an earlier checkpoint with --resume PATH and "
                "a lower train.learning_rate",
            )
        stages.schedule.step()
        return gradient_metrics(norm, learning_rate)

    def _memory_metrics(self) -> Metrics:
        """Tell what the processes have needed so far."""
        peak = peak_memory(self.stages.processes.device)
        if peak is None:
            return {}
        return self.stages.processes.merge({"memory/peak/max": Max(peak), "memory/peak/min": Min(peak)})

    def _commit(self) -> None:
        """Make the present state the one to restart from."""
        self.state = replace(self.state, stages=self._stage_states(), random=RandomState.capture())
        self._restart = self.state

    def _stage_states(self) -> dict[str, object]:
        stages = self.stages
        return {
            "prompts": stages.prompts.state_dict(),
            "scorer": stages.scorer.state_dict(),
            "reward_memory": stages.reward_memory.state_dict(),
            "health": stages.health.state_dict(),
            "recorder": stages.recorder.state_dict(),
            "token_budget": stages.gradients.budget.state_dict(),
        }

    def _record(self, clock: Clock, metrics: Metrics, generation: Generation | None) -> None:
        """Tell about the step that was just done."""
        rollouts = None
        if generation is not None:
            metrics = merge([generation.metrics, metrics])
            rollouts = generation.rollouts
        metrics = {
            **metrics,
            "num_tokens": Sum(self.state.num_tokens),
            "epoch": Mean(self.stages.prompts.epoch, 1),
        }
        report = StepReport(step=self.state.step, metrics=metrics, seconds=clock.seconds())
        self.stages.recorder.record_step(report, rollouts)

    def _evaluate_if_due(self) -> None:
        """Evaluate at the start, every `eval_every` steps and at the end, once each."""
        stages, settings, state = self.stages, self.settings, self.state
        every = settings.eval_every
        due = state.step in {0, settings.total_steps} or (every and state.step % every == 0)
        if stages.evaluator is None or state.evaluated or not due:
            return
        with self._interruptible():
            stages.recorder.phase("evaluate")
            evaluation, problems = stages.evaluator.run(trainer_state(stages, settings, state))
        for problem in problems:
            stages.recorder.warn("eval/rewards/dropped", problem)
        stages.recorder.record_evaluation(evaluation)
        best = self._better(self._best_metric_of(evaluation))
        self.state = replace(state, evaluated=True, best=best or state.best)
        self._commit()
        if best is not None and state.step > 0:
            self._save()
            if stages.processes.is_main:
                stages.checkpoints.mark_best(best)

    def _best_metric_of(self, evaluation: Evaluation) -> float:
        """Give the metric that picks the best checkpoint; NaN if it is missing.

        Raises:
            TrainingError: If already the first evaluation has none of that name. Later on it may be missing for once.
        """
        name = self.settings.best_metric
        if name not in evaluation.metrics:
            there_are = f"there are {', '.join(sorted(evaluation.metrics))}"
            if evaluation.step == 0:
                raise TrainingError(f"eval.best_metric: there is no metric {name}", hint=there_are)
            self.stages.recorder.warn(
                "eval/best_metric/missing",
                f"eval.best_metric: the evaluation at step {evaluation.step} has no metric {name}, and picks no best checkpoint; {there_are}",
            )
        return evaluation.metrics.get(name, math.nan)

    def _better(self, value: float) -> BestCheckpoint | None:
        """Give the new best, if the value is one."""
        if math.isnan(value):
            return None
        best = self.state.best
        better = best is None or (value > best.value if self.settings.greater_is_better else value < best.value)
        return BestCheckpoint(step=self.state.step, metric=self.settings.best_metric, value=value) if better else None

    def _save_if_due(self) -> None:
        """Save every `save_steps` steps and at the end."""
        every, step = self.settings.save_steps, self.state.step
        if step == self.settings.total_steps or (every and step % every == 0):
            self._save()

    def _save(self) -> None:
        self.stages.recorder.phase("checkpoint")
        save_checkpoint(self.stages, self.state)

    def _save_on_the_way_out(self) -> None:
        """After a failure or a signal, save the state before the step that did not finish, if there is anything to lose."""
        if self._restart is None or self._restart.step == 0:
            return
        if self.stages.strategy.in_step and not self.stages.processes.all_come():
            self.stages.recorder.say(
                "the last steps are not saved: it takes all processes, and not all of them are there"
            )
            return
        self.state = self._restart
        self.stages.policy.zero_grad(set_to_none=True)
        try:
            self._save()
        except CheckpointError as error:  # what stopped the run is the better news
            self.stages.recorder.say(str(error))
        except Exception as error:
            if not self.stages.strategy.in_step:
                raise
            # A step that was cut off in the middle may have left exchanges open.
            self.stages.recorder.say(f"the last steps could not be saved: {error}")
