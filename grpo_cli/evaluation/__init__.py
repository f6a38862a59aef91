"""From rewards of completions to numbers that can be trusted: estimators, intervals, comparisons. Pure functions on arrays."""
