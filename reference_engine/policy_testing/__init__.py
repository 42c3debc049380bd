"""Checks a batching policy under random traffic."""
