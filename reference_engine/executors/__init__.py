"""What runs a batch: torch on the CPU, or deterministic tokens without torch."""
