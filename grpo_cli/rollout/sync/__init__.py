"""New weights for a rollout engine that samples from a copy: packed, carried over, checked. Knows neither vLLM nor HTTP."""
