"""The engine lab: scenarios against the bundled engine's policies, in virtual time or for real. The
one place that knows both the load generator and the engine."""
