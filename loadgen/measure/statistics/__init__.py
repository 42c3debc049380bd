"""Estimates from samples: percentiles, proportions, intervals, fits. No knowledge of requests."""
