"""Runs from the result files of other load generators (`slobench import`, `slobench judge`)."""
