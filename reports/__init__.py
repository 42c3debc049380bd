"""A run told on one self-contained HTML page."""
