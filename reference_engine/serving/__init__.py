"""The OpenAI-compatible HTTP server around the engine: options, engine thread, routes, streams."""
