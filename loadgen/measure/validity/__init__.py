"""Whether a run can be believed: what the client, its schedule and the server say of it."""
