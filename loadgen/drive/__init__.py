"""Generation of load: dispatcher, HTTP client, recorder, shard processes, run directory."""
