"""A recipe in a few lines."""

from grpo_cli.recipe.adapters_in_words import adapters_in_words
from grpo_cli.recipe.addresses import server_addresses
from grpo_cli.recipe.reward_names import reward_name
from grpo_cli.recipe.schema import Recipe, VllmSection


def summary(recipe: Recipe) -> str:
    """Say what is trained on what, for what, and how long."""
    train, model, dataset = recipe.train, recipe.model, recipe.dataset
    rewards = ", ".join(reward_name(entry) for entry in recipe.rewards.reward_funcs)
    completions = f"{train.prompts_per_step} prompts x {recipe.grpo.num_generations} completions"
    adapters = adapters_in_words(model, read=False)
    lines = [
        f"model    {model.name_or_path}, trained on {dataset.name} ({dataset.split})",
        *([] if adapters is None else [f"adapters {adapters}"]),
        f"rewards  {rewards}; loss {recipe.grpo.loss_type}",
        f"length   {_length(recipe)}; each step {completions} of up to {recipe.generation.max_completion_length} tokens",
    ]
    if recipe.vllm.mode is not None:
        lines.append(f"engine   {_engine(recipe.vllm)}")
    return "\n".join(f"  {line}" for line in lines)


def _length(recipe: Recipe) -> str:
    steps, epochs = recipe.train.max_steps, recipe.train.num_train_epochs
    if steps is not None:
        return f"{steps} step{'s' if steps > 1 else ''}"
    return f"{epochs:g} epoch{'s' if epochs != 1 else ''}"


def _engine(vllm: VllmSection) -> str:
    if vllm.mode == "colocate":
        size = vllm.tensor_parallel_size
        return "vLLM in the training process" if size == 1 else f"vLLM in every {size} training processes"
    started = ", started and ended with the run" if vllm.start else ""
    return f"vLLM at {', '.join(server_addresses(vllm))}{started}"
