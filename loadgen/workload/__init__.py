"""Planning: from a scenario file to a schedule, by pure functions of (scenario, seed) that use no
socket and no clock."""
