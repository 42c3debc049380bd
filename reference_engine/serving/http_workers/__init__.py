"""HTTP in processes of its own. `processes` starts them, `http_worker` is their program, and
`worker_link` is the engine's end of a `channel` to a worker."""
