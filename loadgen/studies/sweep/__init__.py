"""Sweeps over factors."""
