"""How the weights, gradients and optimizer states of a run are spread over its processes."""
