"""Models of the Llama family in torch, their weights, and the choice of tokens from logits."""
