"""Batching policies, one file each: a read-only view in, a plan out."""
