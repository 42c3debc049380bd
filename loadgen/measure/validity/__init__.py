"""Validity of a run: checks of the load generator, its machine, the schedule and the server."""
