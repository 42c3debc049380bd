"""From recorded rows to numbers with intervals and a verdict: pure functions over the tables."""
