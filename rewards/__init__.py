"""Reward functions that a recipe can name, such as `rewards.length.close_to_characters`.

Each takes keyword arguments, ignores those it does not know, works on plain and conversational completions, and returns one
float per completion, or None where it does not apply. They import nothing of the trainer: copy one and change it.
"""
