"""The routes of the server, a module per subject; `serve` combines them."""
