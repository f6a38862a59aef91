"""The trained model: loading it, its reference, and the forward that gives log-probabilities."""
