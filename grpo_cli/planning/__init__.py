"""What a run will need, worked out from its recipe without its weights and without its machine."""
