"""Decision tables over macro-states of the engine: their states, their files, their look-up."""
