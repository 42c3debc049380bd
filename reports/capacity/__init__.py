"""The page of a capacity search."""
