"""What the server answers, a module per subject; `server` puts them together."""
