"""How long an answer will be: learned from the answers before it, without looking at a model."""
