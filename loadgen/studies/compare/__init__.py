"""The comparison of two sides."""
