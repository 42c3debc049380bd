"""The Llama block and its parts, in plain torch."""
