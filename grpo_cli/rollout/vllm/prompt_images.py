"""Prompts with images as vLLM takes them: it reads one placeholder for each image, and puts as many tokens there as the image takes."""

from typing import Any

from grpo_cli.errors import TrainingError
from grpo_cli.types import Prompt
from grpo_cli.vision.pictures import decoded


def rendered(prompt: Prompt, *, tokenizer: Any, engine: Any) -> Any:
    """Give a prompt in the form that vLLM's engine takes.

    Args:
        prompt: Its text is what the chat template wrote, with one placeholder for each image.
        tokenizer: The model's.
        engine: vLLM's `LLMEngine`.

    Raises:
        TrainingError: If vLLM does not take the images, or makes other tokens of the prompt than the model is trained on.
    """
    if not prompt.images:
        return {"type": "token", "prompt_token_ids": list(prompt.ids)}
    ids = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    try:
        images = [decoded(image) for image in prompt.images]
        (answer,) = engine.renderer.render_cmpl([{"prompt_token_ids": ids, "multi_modal_data": {"image": images}}])
    except Exception as error:  # its renderer calls the model's processor, which raises whatever it meets first
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TrainingError(f"prompt {prompt.uid}: vLLM does not take its images: {reason}") from error
    found = tuple(answer["prompt_token_ids"])
    if found != prompt.ids:
        others = ", and others" if len(found) == len(prompt.ids) else ""
        raise TrainingError(
            f"prompt {prompt.uid}: with its images vLLM makes {len(found)} tokens of it, and the model's processor {len(prompt.ids)}{others}",
            hint="they prepare images differently: leave out model.processor_kwargs, use another vLLM, or leave out vllm.mode",
        )
    return answer
