"""Rows of the table of claims, a module per topic."""
