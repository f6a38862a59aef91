"""The least arithmetic that a step needs, to be compared with how fast the machine multiplies matrices (see `measure`).

A forward over U unique tokens (every prompt once, every completion without its last token) of which C completion tokens are scored:

    forward = 2 * B * U  +  2 * V * H * C  +  4 * A * L * (sum over unique tokens of the tokens they see, themselves included)

floating-point operations, with B the parameters of the matrices between embedding and head, V the vocabulary, H the hidden size, A the
width of all attention heads together and L the number of layers. A backward takes twice that. So generating and the reference's
log-probabilities need one forward each, the training step three. Softmax, norms, activations and the optimizer are left out.
"""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.workload import Workload

FORWARDS = {"generate": 1, "reference": 1, "train_step": 3, "whole_step": 5}
"""How many forwards' worth of arithmetic each part of a step needs."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The numbers of the formula."""

    body_parameters: int
    vocabulary: int
    hidden: int
    attention_width: int
    layers: int

    @classmethod
    def of(cls, folder: str) -> "ModelSize":
        """Read them from a model folder; no weights are loaded."""
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        matrices = [weight for weight in model.parameters() if weight.ndim == 2 and id(weight) not in embeddings]
        heads = config.num_attention_heads
        return cls(
            body_parameters=sum(weight.numel() for weight in matrices),
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            attention_width=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads),
            layers=config.num_hidden_layers,
        )


def forward_operations(size: ModelSize, workload: Workload) -> float:
    """Floating-point operations of one forward."""
    matrices = 2.0 * size.body_parameters * workload.unique_tokens
    head = 2.0 * size.vocabulary * size.hidden * workload.completion_tokens
    return matrices + head + 4.0 * size.attention_width * size.layers * seen_tokens(workload)


def seen_tokens(workload: Workload) -> int:
    """Sum up, over all unique tokens, how many tokens each of them sees."""
    seen = 0
    for prompt, group in zip(workload.prompt_ids, workload.completion_ids, strict=True):
        seen += _triangle(len(prompt))
        seen += sum(_triangle(len(prompt) + len(ids) - 1) - _triangle(len(prompt)) for ids in group)
    return seen


def _triangle(count: int) -> int:
    """1 + 2 + ... + count."""
    return count * (count + 1) // 2
