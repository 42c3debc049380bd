"""Recorded traffic, read exactly: one file per format, found by name or by the columns it has."""
