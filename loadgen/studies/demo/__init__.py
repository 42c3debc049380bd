"""Load generators against a server whose latencies are known."""
