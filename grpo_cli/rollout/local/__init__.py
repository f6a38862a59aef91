"""The built-in engine: samples from the policy in this process."""

from grpo_cli.rollout.local.engine import LocalEngine

__all__ = ["LocalEngine"]
