"""Studies: each folder holds what was asked, how it runs, its numbers, its tables and its page."""
