"""The built-in engine: samples from the policy in this process."""
