"""The engine as an HTTP server: wiring, the service around the engine thread, and its routes."""
