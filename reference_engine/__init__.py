"""The bundled engine: a small, honest LLM server whose batching policy is one word."""
