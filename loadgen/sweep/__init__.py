"""Sweeps: axes, cells, runs, and their table, figures and Pareto front."""
