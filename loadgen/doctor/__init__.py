"""`slobench doctor`: whether this machine and that server are fit to be measured with."""
