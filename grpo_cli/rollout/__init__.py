"""Prompts become completions."""
