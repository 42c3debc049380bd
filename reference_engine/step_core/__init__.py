"""Simulated engines in C: the steps of `simulator` and `core` on arrays, with the same results."""
