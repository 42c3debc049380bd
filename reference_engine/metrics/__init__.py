"""Counters, histograms and GPU readings, and their text for GET /metrics."""
