"""The highest load that keeps the promise: what probes told, the curve through them, and where to
probe next. Pure: probes in, the next question or the answer out."""
