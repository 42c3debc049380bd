"""The load generator: what to send (`workload`), sending it (`drive`), what it means (`measure`),
and the CLI."""
