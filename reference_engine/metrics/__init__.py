"""Measurements of a running engine, and the page of `/metrics`."""
