"""Sizing: the replicas and GPUs that a peak load needs."""
