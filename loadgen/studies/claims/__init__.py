"""Published claims about batching, each beside a number that was measured here."""
