"""Other tools' command lines as scenarios: one file per tool."""
