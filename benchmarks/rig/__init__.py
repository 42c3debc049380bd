"""What the benchmarks of the load generator share: three clients on one core, the machine."""
