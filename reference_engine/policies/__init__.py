"""Batching policies: a read-only view in, a plan out; one file per mode."""
