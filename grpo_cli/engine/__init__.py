"""The loop, and everything that binds the stages together."""
