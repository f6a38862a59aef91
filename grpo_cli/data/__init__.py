"""Rows become prompts, in a resumable order."""
