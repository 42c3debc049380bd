"""From a scenario file to a schedule: pure functions of (scenario, seed); nothing here knows a
socket or a clock."""
