"""Formats of recorded traffic, chosen by name or recognized by their columns."""
