"""The table of metric names: unit, meaning, and what a number averages over.

It orders the keys of metrics.jsonl and is the README's table. `python -m grpo_cli.telemetry.names README.md --write` renews that
table, `--check` fails if it is out of date.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EVALUATION_PREFIX = "eval/"


@dataclass(frozen=True, slots=True)
class MetricName:
    """One metric.

    Attributes:
        name: As in metrics.jsonl; `{name}` stands for a reward function's name, `{k}` for a number of completions.
        unit: What the number counts.
        over: What it is a sum, mean, minimum or maximum over.
        meaning: One or two sentences, for the README.
    """

    name: str
    unit: str
    over: str
    meaning: str


TABLE: tuple[MetricName, ...] = (
    MetricName("reward", "reward", "mean over completions", "Weighted sum of the rewards. A reward that did not apply adds nothing; a completion without any is left out. Where `eval.datasets` names several, `eval/reward` is the mean of theirs."),
    MetricName("reward_std", "reward", "over completions", "Standard deviation of `reward` over all completions of the generation."),
    MetricName("frac_reward_zero_std", "share", "mean over groups", "Groups whose completions all got the same reward: they teach nothing."),
    MetricName("reward/{name}/mean", "reward", "mean over completions", "One reward function, unweighted, where it applied."),
    MetricName("reward/{name}/std", "reward", "over completions", "Standard deviation of one reward function, where it applied."),
    MetricName("reward/{name}/failed_prompts", "prompts", "sum", "Prompts that one reward function failed on. Missing in steps without one, as is the next."),
    MetricName("reward/{name}/repeated_calls", "calls", "sum", "Calls that were made again because of `retries`."),
    MetricName("rewards/failed_prompts", "prompts", "sum", "Prompts that a reward function failed on (`rewards.on_error: drop` or `value`)."),
    MetricName("rewards/dropped_prompts", "prompts", "sum", "Prompts left out because a reward function failed (`rewards.on_error: drop`)."),
    MetricName("avg@{k}", "share", "mean over completions", "Correct completions (`eval.success`), of k for each prompt. This and the next two only in evaluations, and only where it can be told which completions are correct."),
    MetricName("pass@{k}", "share", "mean over prompts", "Chance that at least one of k completions is correct, by the unbiased estimate from all completions of the prompt ([2107.03374](https://arxiv.org/abs/2107.03374)); for k = 1, 2, 4, ... up to `eval.num_generations`."),
    MetricName("maj@{k}", "share", "mean over prompts", "Prompts whose most frequent answer is correct, a tie counting in parts. Only where the answers are known (`eval.answer_column`, `eval.answer_function`)."),
    MetricName("loss", "loss", "sum over micro-batches", "The objective. Its size says little: see the FAQ."),
    MetricName("policy_loss", "loss", "sum over micro-batches", "The objective without the entropy bonus. Only with `grpo.entropy_coef`."),
    MetricName("grad_norm", "norm", "per step", "Norm of the gradient before clipping."),
    MetricName("learning_rate", "", "per step", "Learning rate that the step was made with."),
    MetricName("entropy", "nats", "mean over tokens", "Entropy of the policy's next-token distribution at the sampled tokens. A collapse to 0 ends exploration. This and the next ones are over the tokens that were computed: see `tokens/skipped`."),
    MetricName("entropy_coef", "", "per step", "Weight of the entropy bonus. Only with `grpo.entropy_coef`."),
    MetricName("aux_loss", "loss", "mean over tokens", "Load-balancing loss of a mixture of experts, unweighted. Only with `grpo.router_aux_loss_coef`, the model's own or the recipe's, above 0."),
    MetricName("kl", "nats", "mean over tokens", "Estimated divergence from the reference model (k3). Only with `grpo.beta` above 0."),
    MetricName("clip_ratio/region_mean", "share", "mean over tokens", "Tokens whose gradient the clip stops, on either side (sequences instead of tokens with sequence-level ratios)."),
    MetricName("clip_ratio/low_mean", "share", "mean over tokens", "Those with a ratio below the range and a negative advantage."),
    MetricName("clip_ratio/low_min", "share", "minimum over sequences", "The least of that share over single completions."),
    MetricName("clip_ratio/high_mean", "share", "mean over tokens", "Those with a ratio above the range and a positive advantage."),
    MetricName("clip_ratio/high_max", "share", "maximum over sequences", "The greatest of that share over single completions."),
    MetricName("cispo_clip_ratio", "share", "mean over tokens", "Tokens of positive advantage whose weight the ceiling cuts. Only with `loss_type: cispo`."),
    MetricName("vespo/phi_seq_mean", "weight", "mean over sequences", "Weight of a sequence. Only with `loss_type: vespo`."),
    MetricName("completions/mean_length", "tokens", "mean over completions", "Length of a completion, the stop token included."),
    MetricName("completions/min_length", "tokens", "minimum over completions", "The shortest."),
    MetricName("completions/max_length", "tokens", "maximum over completions", "The longest."),
    MetricName("completions/mean_terminated_length", "tokens", "mean over terminated completions", "Length of those that ended by themselves; null if none did."),
    MetricName("completions/min_terminated_length", "tokens", "minimum over terminated completions", "The shortest of them."),
    MetricName("completions/max_terminated_length", "tokens", "maximum over terminated completions", "The longest of them."),
    MetricName("completions/clipped_ratio", "share", "mean over completions", "Completions cut at `generation.max_completion_length`."),
    MetricName("sampling/logp_difference/mean", "nats", "mean over tokens", "Distance between the rollout engine's and the trainer's log-probability of the sampled tokens. Near 0 if the two agree."),
    MetricName("sampling/logp_difference/max", "nats", "maximum over tokens", "The greatest distance."),
    MetricName("sampling/importance_ratio/min", "ratio", "minimum", "Trainer's over rollout engine's probability: the least."),
    MetricName("sampling/importance_ratio/mean", "ratio", "mean over tokens", "The mean of that ratio. Near 1 if the two agree."),
    MetricName("sampling/importance_ratio/max", "ratio", "maximum", "The greatest."),
    MetricName("sampling/importance_ratio/clipped_fraction", "share", "mean over tokens", "Ratios outside the bounds of the rollout correction. This and the next two only with `vllm.importance_sampling_correction`."),
    MetricName("sampling/importance_ratio/clipped_mean", "ratio", "mean over tokens", "The mean of the ratio as the policy term is multiplied with it, after the bounds."),
    MetricName("sampling/importance_ratio/masked_sequences", "share", "mean over completions", "Completions that the rollout correction leaves out of the policy term: their mean weight is below 0.1. Only with vLLM."),
    MetricName("canary/logp_difference/mean", "nats", "mean over tokens", "Distance between vLLM's and the trainer's log-probability of a fixed probe, right after new weights. Only in steps with a check (`vllm.canary_steps`), as is the next."),
    MetricName("canary/logp_difference/max", "nats", "maximum over tokens", "The greatest distance."),
    MetricName("policy_version", "steps", "per step", "Optimizer steps behind the weights that sampled what this step trains on."),
    MetricName("staleness", "steps", "mean over completions", "Optimizer steps between sampling and training."),
    MetricName("epoch", "epochs", "per step", "Passes over the dataset so far."),
    MetricName("num_tokens", "tokens", "sum since the start", "Prompt and completion tokens generated so far; a prompt counts once per completion."),
    MetricName("tokens/useful", "tokens", "sum", "Tokens that the forward of this step needed."),
    MetricName("tokens/skipped", "tokens", "sum", "Completion tokens that were not computed because they add nothing to the gradient: advantage 0, or masked."),
    MetricName("tokens/computed", "tokens", "sum", "Tokens that it computed, padding included."),
    MetricName("tokens_per_second", "tokens/s", "per step", "`tokens/useful` by `step_time`."),
    MetricName("step_time", "s", "per step", "Wall time of the whole step, generation included."),
    MetricName("time/generate", "s", "per step", "Wall time of sampling; missing in a step that trains on older completions, as is the next."),
    MetricName("time/score", "s", "per step", "Wall time of the reward functions."),
    MetricName("time/reward/{name}", "s", "sum", "What the calls of one reward function took, added up, where rewards are spread also over processes: some run at the same time."),
    MetricName("time/reward/{name}/mean", "s", "mean over calls", "What a call took. Only with `per_prompt`, as is the next."),
    MetricName("time/reward/{name}/max", "s", "maximum over calls", "What the slowest took."),
    MetricName("time/forward_backward", "s", "per step", "Wall time of forward and backward passes, old and reference log-probabilities included."),
    MetricName("processes/imbalance", "ratio", "per step", "Time that the slowest process took for its forward and backward passes, by the mean of all. Only with several processes."),
    MetricName("memory/peak/max", "bytes", "maximum over processes", "The most memory that a process has had at one time since the start: of a GPU what its tensors took, else resident memory."),
    MetricName("memory/peak/min", "bytes", "minimum over processes", "The same of the process that needed least."),
    MetricName("time/optimizer", "s", "per step", "Wall time of clipping and the optimizer."),
    MetricName("time/sync", "s", "per step", "Wall time of handing the newest weights to the rollout engine, before it samples; missing in steps that do not sample, as is the next."),
    MetricName("rollout/recoveries", "recoveries", "sum", "Times that the vLLM servers were lost, came back, and got the weights anew. Missing in steps without one."),
    MetricName("sync/bytes", "bytes", "sum", "Size of the weights handed over. Only with vLLM: the built-in engine samples from the trainer's own."),
)  # fmt: skip  # one metric a line

_PATTERNS = tuple(
    re.compile(re.escape(metric.name).replace(r"\{name\}", ".+").replace(r"\{k\}", r"\d+")) for metric in TABLE
)


def find(name: str) -> MetricName | None:
    """Look up a metric, with or without `eval/` or `eval/{dataset}/` in front; None for one that a reward function logged."""
    rank = _rank(name)
    return TABLE[rank] if rank < len(TABLE) else None


def in_table_order(names: Iterable[str]) -> list[str]:
    """Sort names as in the table; those of one row, and at the end those that reward functions logged, by alphabet."""
    return sorted(names, key=lambda name: (_rank(name), name))


def _rank(name: str) -> int:
    bare = name.removeprefix(EVALUATION_PREFIX)
    rank = _bare_rank(bare)
    if rank == len(TABLE) and bare != name:
        return _bare_rank(bare.partition("/")[2])  # of a dataset with a name
    return rank


def _bare_rank(name: str) -> int:
    """Look for a name as it is; of rows that it fits, the one that says most of it: `time/reward/{name}/max` ends as a function's name may."""
    fitting = (rank for rank, pattern in enumerate(_PATTERNS) if pattern.fullmatch(name))
    return max(fitting, key=lambda rank: len(TABLE[rank].name), default=len(TABLE))


def metric_table() -> str:
    """Give the table as Markdown."""
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.over} | {metric.meaning} |" for metric in TABLE]
    return "\n".join(["| metric | unit | reduction | meaning |", "|---|---|---|---|", *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or renew the table of metrics in a file; give the exit code."""
    from grpo_cli.recipe.reference import renew_table  # noqa: PLC0415  only this command needs it

    return renew_table("metrics", metric_table(), module="grpo_cli.telemetry.names", arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
