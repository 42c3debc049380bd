"""The engine lab: scenarios against the bundled engine's modes, in virtual or real time. The only
room that imports both the load generator and the engine."""
