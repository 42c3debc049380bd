"""Capacity search: the highest load at which a target meets the SLO."""
