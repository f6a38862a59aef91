"""Completions of prompts with images by a served vLLM, which has no route for tokens with encoded images.

Imports vLLM: for the server's process only.
"""

import asyncio
import math
import uuid
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.vllm.engine_parameters import engine_parameters
from grpo_cli.rollout.vllm.prompt_images import ImagePrompt, images_per_prompt


async def completed_after_images(
    engine: Any, asked: Mapping[str, Any], *, opening: asyncio.Semaphore, threads: Executor
) -> dict[str, Any]:
    """Complete one prompt.

    Args:
        engine: vLLM's client of its engine.
        asked: What `ImagePrompt.request` and `sampling_fields` say, read from JSON.
        opening: Held while images are open.
        threads: Open them, and go on to the end with what a client has left meanwhile.

    Returns:
        What `/v1/completions` answers, as far as the trainer reads it.

    Raises:
        TrainingError: If the request is wrong, or vLLM does not take its images or makes other tokens of them than it says.
    """
    prompt = ImagePrompt.from_request(asked)
    try:
        parameters = engine_parameters(asked)
    except Exception as error:  # they are made of the request alone
        raise TrainingError(f"prompt {prompt.uid}: {error}") from error
    async with opening:
        prompt.check_number(images_per_prompt(engine))
        with prompt.explained():
            opened = await asyncio.get_running_loop().run_in_executor(threads, prompt.opened)
            (rendered,) = await engine.renderer.render_cmpl_async([opened])
    try:
        answers = engine.generate(prompt.checked(rendered), parameters, uuid.uuid4().hex)
        (answer,) = [answer async for answer in answers]  # one: the parameters ask for nothing before the end
    except BaseException:
        _forget(rendered, engine)
        raise
    return {"choices": [_choice(output) for output in answer.outputs]}


def _forget(rendered: Mapping[str, Any], engine: Any) -> None:
    """Have images sent to the engine's process when they come again: what is rendered counts as sent, and of these nobody knows."""
    cache = engine.renderer.mm_processor_cache
    # Older versions have none: there the next request with such an image fails, once, and is asked again.
    forget = getattr(cache, "invalidate", None)
    if forget is not None:
        for name in rendered["mm_hashes"].get("image", ()):
            forget(name)


def _choice(output: Any) -> dict[str, Any]:
    """Write a completion. One that vLLM ended by an error has a reason that the trainer does not know, and asks for again."""
    logps = [logp if math.isfinite(logp) else None for logp in output.logprobs.logprobs]
    return {
        "index": output.index,
        "token_ids": list(output.token_ids),
        "logprobs": {"token_logprobs": logps},
        "finish_reason": output.finish_reason,
    }
