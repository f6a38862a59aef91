"""Numbers that the tests of vLLM in the training process share."""

END = 257
"""Id of the end-of-sequence token, which is in every stop set: vLLM bans it before `min_tokens` in any case."""
KEY = (1, "train", 0)
G = 4
LONGEST = 200
SEQUENCES = 16
