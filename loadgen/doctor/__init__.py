"""`slobench doctor`: checks how much load this machine can measure accurately, or whether a server
can be measured."""
