"""manifest.json of a run directory as typed sections, and the client's measurements of itself."""
