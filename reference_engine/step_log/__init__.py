"""The engine's log: written to files, read back, and replayed."""
