"""Images of prompts: what the stages that read, sample and train have in common about them."""
