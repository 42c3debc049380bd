"""Executors, which run batches: torch on a CPU or a GPU, a simulator, and a toy without torch."""
