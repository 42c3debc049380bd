"""The load generator: planning the traffic (`workload`), sending it (`drive`), measuring the result
(`measure`), and the command line (`cli`)."""

__version__ = "0.1.0"
