"""What a run needs of memory, by part."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of one process by part; None: not known for this architecture.

    Attributes:
        weights: Its part of the policy's.
        gradients: Its part.
        optimizer: Its part of the moments, and of the copies that the optimizer moves.
        reference: Its part of a second model's weights.
        gathered: Weights, and gradients of them, that are whole while a forward or backward uses them.
        rounded: Copies of the weights in bfloat16, which autocast makes and the backward reads where no layer is computed again.
        activations: What the backward keeps of a micro-batch.
        head: Logits and gradients of embedding and head, as far as they come on top.
        prompt_copies: Keys and values for each completion that reads them, where attention is computed with masks.
        images: What the backward keeps of a micro-batch's images in the vision tower.
        sampled: Copies of weights while the built-in engine samples: all of a policy that is in parts, and those in oneDNN's order.
        cache: Keys and values of the built-in engine.
        vllm: What vLLM takes.
        keeps_gradients: Whether room for gradients is held between two steps, too.
        vllm_sleeps: Whether vLLM has its memory only while it samples.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    gathered: int
    rounded: int
    activations: int | None
    head: int | None
    prompt_copies: int
    images: int
    sampled: int
    cache: int | None
    vllm: int
    keeps_gradients: bool = False
    vllm_sleeps: bool = False

    @property
    def parts(self) -> dict[str, int | None]:
        """All numbers of bytes by name."""
        return {name: value for name, value in asdict(self).items() if name not in ("keeps_gradients", "vllm_sleeps")}

    @property
    def training(self) -> int:
        """Known bytes during a backward."""
        used = self.gradients + self.gathered + self.rounded
        used += (self.activations or 0) + (self.head or 0) + self.prompt_copies + self.images
        return self.weights + self.optimizer + self.reference + used + (0 if self.vllm_sleeps else self.vllm)

    @property
    def sampling(self) -> int:
        """Known bytes while completions are sampled."""
        used = self.sampled + (self.cache or 0) + (self.gradients if self.keeps_gradients else 0)
        return self.weights + self.optimizer + self.reference + used + self.vllm

    @property
    def total(self) -> int:
        """The larger of the two: they take turns."""
        return max(self.training, self.sampling)
