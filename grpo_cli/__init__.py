"""Train language models with GRPO and its family, from YAML recipes."""

__version__ = "0.1.0"
