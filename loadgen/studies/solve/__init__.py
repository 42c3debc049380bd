"""The best size of each batch: solved, then measured in the simulator."""
