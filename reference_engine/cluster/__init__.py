"""Several engines behind a router, in virtual time."""
