"""From a schedule to recorded rows: dispatcher, the one socket file, recorder, run directory."""
