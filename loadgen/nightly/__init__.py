"""Every night the same measurement: what is measured, what is kept, and what a change is called."""
