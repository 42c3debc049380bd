"""The bundled engine: a small LLM server with batching policies by name."""
