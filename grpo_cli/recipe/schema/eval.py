"""`eval:` held-out prompts during training."""

from dataclasses import dataclass

from grpo_cli.recipe.schema.dataset import DatasetSection
from grpo_cli.recipe.schema.option import option


@dataclass(kw_only=True)
class EvalSection:
    """Evaluation with the run's rewards; it never touches training's randomness."""

    dataset: DatasetSection | None = option(
        None, help="Held-out rows, with the keys of `dataset`; no evaluation if left out."
    )
    every: int = option(0, minimum=0, help="Steps between evaluations; 0 evaluates only at the start and the end.")
    num_generations: int = option(1, minimum=1, help="Completions per prompt.")
    temperature: float = option(0.0, minimum=0, maximum=10, help="0 takes the likeliest token.")
    top_p: float = option(1.0, above=0, maximum=1, help="Keep the likeliest tokens up to this mass.")
    top_k: int = option(0, minimum=0, help="Keep this many tokens; 0 keeps all.")
    min_p: float = option(
        0.0, minimum=0, maximum=1, help="Keep tokens at least this likely, relative to the likeliest."
    )
    repetition_penalty: float = option(1.0, above=0, help="Lowers the logits of tokens seen before; 1 is off.")
    max_completion_length: int | None = option(None, minimum=1, help="As in `generation` if left out.")
    best_metric: str = option("eval/reward", non_empty=True, help="Evaluation metric that picks the best checkpoint.")
    greater_is_better: bool = option(True, help="Whether a larger `best_metric` is better.")
