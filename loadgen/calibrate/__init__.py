"""Calibration: from the measured steps of a server to a hardware file for the simulator."""
