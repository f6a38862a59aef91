"""`dataset:` where prompts come from, and how a row becomes one."""

from dataclasses import dataclass
from typing import Any, Literal

from grpo_cli.recipe.schema.option import option


@dataclass(kw_only=True)
class DatasetSection:
    """Rows, and how they become prompts."""

    name: str = option(
        non_empty=True,
        help="Hub id; a local json, jsonl, csv, parquet or arrow file, a glob of such files, or a folder; or the dotted path of a "
        "function that returns a datasets.Dataset. Local paths resolve from the recipe's folder, then the working folder.",
    )
    config: str | None = option(None, help="Configuration name of a hub dataset.")
    split: str = option("train", non_empty=True, help="Split to use; slices such as `train[:1000]` work.")
    revision: str | None = option(None, help="Branch, tag or commit of a hub dataset.")
    arguments: dict[str, Any] = option(
        factory=dict, help="Keyword arguments for the function, if `name` is a dotted path."
    )
    streaming: bool = option(False, help="Read rows as they come instead of downloading all. Needs `train.max_steps`.")
    shuffle: bool = option(True, help="Draw rows in a random order that depends only on `train.seed` and the epoch.")
    shuffle_buffer_size: int = option(10_000, minimum=1, help="Rows that a streaming dataset shuffles among.")
    max_rows: int | None = option(None, minimum=1, help="Use only the first rows.")
    columns: dict[str, str] = option(
        factory=dict,
        help="Rename columns: name that prompts and rewards use to name in the dataset, such as `{prompt: question}`.",
    )
    conversational: bool = option(
        False, help="Turn a string prompt into a user message, so that the chat template applies."
    )
    system_prompt: str | None = option(
        None, help="System message put before every conversational prompt that does not bring its own."
    )
    chat_template_kwargs: dict[str, Any] = option(
        factory=dict, help="Extra variables for the chat template, such as `{enable_thinking: false}`."
    )
    max_prompt_length: int | None = option(None, minimum=1, help="Longest prompt in tokens; none if left out.")
    max_prompt_length_policy: Literal["drop", "truncate_left", "error"] = option(
        "drop",
        help="What happens to a longer prompt: left out (and counted), cut from the left, or an error. One with images is never cut but left "
        "out.",
    )
