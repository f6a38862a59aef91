"""Completions become rewards."""
