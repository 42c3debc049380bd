"""What benchmarks share: clients on one core, simulated servers and nights, the machine."""
