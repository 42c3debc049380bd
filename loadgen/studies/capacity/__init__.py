"""The capacity search."""
