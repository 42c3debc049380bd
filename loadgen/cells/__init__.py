"""Repeated measurements of cells (a scenario against a target): order, runs, servers."""
