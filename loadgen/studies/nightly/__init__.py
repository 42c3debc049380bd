"""The nightly measurement and its baseline."""
