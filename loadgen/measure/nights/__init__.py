"""Nightly comparison: the record of a night, its statistics, and its verdict against earlier
nights."""
