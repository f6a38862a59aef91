"""`logging:` what is shown and recorded."""

from dataclasses import dataclass
from typing import Literal

from grpo_cli.recipe.schema.option import option


@dataclass(kw_only=True)
class LoggingSection:
    """Console, completion files and trackers. `metrics.jsonl` is always written, one object per step."""

    log_completions: bool = option(True, help="Write sampled completions with their rewards to parquet.")
    num_completions_to_log: int | None = option(
        4096,
        minimum=1,
        help="Completions that are written of what is sampled at once, if it is more: those of the first prompts, with all of each; null: "
        "all of them.",
    )
    print_completions_steps: int = option(
        10, minimum=0, help="Steps between sample completions on the console; 0 shows none."
    )
    num_completions_to_print: int = option(3, minimum=1, help="Completions shown each time.")
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = option(
        factory=list, help="Trackers to report to, besides the files."
    )
    project: str | None = option(None, help="Project name for W&B and Trackio.")
