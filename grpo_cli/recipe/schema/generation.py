"""`generation:` how completions are sampled."""

from dataclasses import dataclass

from grpo_cli.recipe.schema.option import option


@dataclass(kw_only=True)
class GenerationSection:
    """Sampling during training. Filters are applied on both sides of the ratio."""

    max_completion_length: int = option(256, minimum=1, help="Longest completion in tokens.")
    min_completion_length: int = option(0, minimum=0, help="Stop tokens cannot be sampled before this many tokens.")
    temperature: float = option(
        1.0, above=0, maximum=10, help="Logits are divided by it, when sampling and in every log-probability."
    )
    top_p: float = option(1.0, above=0, maximum=1, help="Keep the likeliest tokens up to this mass.")
    top_k: int = option(0, minimum=0, help="Keep this many tokens; 0 keeps all.")
    min_p: float = option(
        0.0, minimum=0, maximum=1, help="Keep tokens at least this likely, relative to the likeliest."
    )
    repetition_penalty: float = option(
        1.0, above=0, help="Lowers the logits of tokens seen before. Only 1 (off) in training: see the error it gives."
    )
    stop: list[str] = option(factory=list, help="Strings that end a completion; they stay in its text.")
    stop_token_ids: list[int] = option(
        factory=list, help="Token ids that end a completion, besides those that the tokenizer and the model name."
    )
    max_num_seqs: int = option(
        64,
        minimum=1,
        help="Completions that the local engine samples at once. vLLM takes as many as fit; `vllm.engine` can bound it.",
    )
