"""Scenario files that read like prose, shipped as package data."""
