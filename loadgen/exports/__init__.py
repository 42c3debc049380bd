"""A run in the formats of others: tables for spreadsheets and notebooks, and vLLM's result JSON."""
