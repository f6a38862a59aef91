"""Pure functions on tensors: advantages, ratios, losses. No I/O, no collectives, no recipe."""
