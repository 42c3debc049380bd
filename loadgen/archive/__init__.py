"""Recorded runs on disk: tables, checksums, decoding of parts, run directory and its lock."""
