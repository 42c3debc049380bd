"""Self-contained HTML pages, figures and terminal tables of results."""
