"""Recorded runs in other formats: tables for spreadsheets and notebooks, and vLLM's result JSON."""
