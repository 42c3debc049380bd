"""The page of a planned schedule."""
