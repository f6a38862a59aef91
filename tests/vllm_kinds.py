"""Have vLLM, where it is installed, look at all kinds of models that the tests run with it. `scripts/environment` does so once.

Left to itself it looks at each kind when it first meets it, in a process of its own, which imports it for ten seconds, and keeps what it
saw in its cache. This does the same for all kinds in one process, and what the cache holds then is the same.
"""

import gc
from importlib.util import find_spec

KINDS = (
    *("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    *("InternVLForConditionalGeneration", "LlamaForCausalLM", "LlavaNextForConditionalGeneration", "Phi3ForCausalLM"),
    *("Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM"),
    *("Qwen3MoeForCausalLM", "Qwen3VLForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    "TransformersForCausalLM",
)


def look_at_all_kinds() -> None:
    """Fill vLLM's cache."""
    gc.disable()  # modules never become garbage
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: (
        look()
    )  # so that the process that asks sees no GPU; here nothing comes after it
    for kind in KINDS:
        registry.ModelRegistry.models[kind].inspect_model_cls()


if __name__ == "__main__" and find_spec("vllm") is not None:
    look_at_all_kinds()
