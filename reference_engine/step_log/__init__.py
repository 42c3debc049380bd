"""One record per step and per event: in memory, in files, and replayed."""
