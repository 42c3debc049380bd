"""A scenario against a target, repeated: order, shared servers, resume."""
