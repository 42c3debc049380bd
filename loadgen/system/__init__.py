"""The machine and the process: files, clocks, signals, compilers, loaded Python files."""
