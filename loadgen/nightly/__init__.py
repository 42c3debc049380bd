"""Nightly benchmarks: cells, baseline, comparison and files of a night."""
