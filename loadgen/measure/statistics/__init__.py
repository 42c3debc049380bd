"""Estimates from samples and their confidence intervals. Nothing here knows about requests or
runs."""
