"""The command line: one file per help panel, their shared flags, and the process boundary."""
