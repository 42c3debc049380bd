"""From measured steps to a hardware file of the simulator."""
