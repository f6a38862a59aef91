"""Groups as the rollout stage hands them over, made from plain texts."""

from collections.abc import Sequence
from typing import Any

import torch

from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt, PromptId

STATE = TrainerState(global_step=3, max_steps=12, epoch=0.5, progress=0.25)


def group(number: int, prompt: str, texts: Sequence[str], *, conversational: bool = False, **columns: Any) -> Group:
    """Build a group; a token per character, ids are code points."""
    messages = ({"role": "user", "content": prompt},) if conversational else None
    return Group(
        prompt=Prompt(
            uid=PromptId(f"0:{number}"),
            ids=(1, 2),
            text=f"<user>{prompt}" if conversational else prompt,
            messages=messages,
            row={"prompt": list(messages) if messages else prompt, **columns},
        ),
        completions=tuple(
            Completion(
                index=index,
                ids=tuple(map(ord, text)) or (0,),
                logps=torch.zeros(max(1, len(text))),
                text=text,
                finish_reason=FinishReason.STOP,
                policy_version=PolicyVersion(0),
            )
            for index, text in enumerate(texts)
        ),
    )
