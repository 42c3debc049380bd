"""The page of a night, and its verdict for CI systems."""
