"""The engine's bookkeeping as plain data: requests, KV blocks, queues, plans, costs."""
