"""Decision tables over macro-states of the engine: the states, the files and the look-up."""
