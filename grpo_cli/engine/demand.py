"""What a run asks of one of its processes, in tokens, sequences and bytes."""

from dataclasses import dataclass

from grpo_cli.recipe.schema import Recipe


def fed_tokens(*, prompts: int, group: int, longest_prompt: int, completion: int, shares_prefix: bool) -> int:
    """Count the tokens that go through the policy for some prompts with groups of completions, all as long as they may be."""
    return prompts * (longest_prompt + group * completion if shares_prefix else group * (longest_prompt + completion))


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a run asks of one process.

    Attributes:
        micro_batch_tokens: Most tokens in one forward.
        trained_tokens: That it feeds for one optimizer step, with prompts and completions as long as they may be.
        sampled_sequences: Completions of one generation.
        longest_prompt: Tokens of the longest prompt.
        with_reference: Whether there is a second model.
        vllm: Bytes that vLLM takes of this machine's memory; None: the built-in engine samples, which needs a cache of its own.
        vllm_sleeps: Whether it gives them back while the policy is trained.
        most_cached_tokens: Bound of that cache; None: not known.
        read_keys: Keys of the trained tokens, each counted once for every completion that reads it, where prompts are fed once; else 0.
        image_tokens: Of the trained ones, those of prompts with images, which are taken to be images throughout.
    """

    micro_batch_tokens: int
    trained_tokens: int
    sampled_sequences: int
    longest_prompt: int
    with_reference: bool
    vllm: int | None = None
    vllm_sleeps: bool = False
    most_cached_tokens: int | None = None
    read_keys: int = 0
    image_tokens: int = 0

    def read_keys_of(self, tokens: int) -> int:
        """Count those of a micro-batch of some tokens."""
        return -(-self.read_keys * tokens // self.trained_tokens)

    def image_tokens_of(self, tokens: int) -> int:
        """Count the most that a micro-batch of some tokens can hold: where completions turn out short, it is prompts and little else."""
        return min(self.image_tokens, tokens)

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        *,
        processes: int,
        micro_batch_tokens: int,
        longest_prompt: int,
        shares_prefix: bool,
        with_reference: bool,
        vllm: int | None,
        most_cached_tokens: int | None = None,
        sees: bool = False,
    ) -> "Demand":
        """Count the share of one of the processes that has most to do, where prompts and completions are as long as they may be."""
        prompts, group = -(-recipe.train.prompts_per_step // processes), recipe.grpo.num_generations
        return cls(
            micro_batch_tokens=micro_batch_tokens,
            trained_tokens=fed_tokens(
                prompts=prompts,
                group=group,
                longest_prompt=longest_prompt,
                completion=recipe.generation.max_completion_length,
                shares_prefix=shares_prefix,
            ),
            sampled_sequences=prompts * group * recipe.grpo.steps_per_generation,
            longest_prompt=longest_prompt,
            with_reference=with_reference,
            vllm=vllm,
            vllm_sleeps=recipe.vllm.enable_sleep_mode,
            most_cached_tokens=most_cached_tokens,
            read_keys=prompts * group * (longest_prompt + recipe.generation.max_completion_length)
            if shares_prefix
            else 0,
            image_tokens=image_tokens(
                recipe, processes=processes, longest_prompt=longest_prompt, shares_prefix=shares_prefix
            )
            if sees
            else 0,
        )


def image_tokens(recipe: Recipe, *, processes: int, longest_prompt: int, shares_prefix: bool) -> int:
    """Count the tokens of a process's prompts in an optimizer step as they are fed, all as long as they may be.

    How many of them are images is not known before all are prepared; where there are images, it is most.
    """
    prompts, group = -(-recipe.train.prompts_per_step // processes), recipe.grpo.num_generations
    return prompts * longest_prompt * (1 if shares_prefix else group)
