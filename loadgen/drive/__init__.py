"""From a schedule to recorded rows: the dispatcher, the one socket file, the recorder, the run directory."""
