"""Plain data of the engine: requests, KV blocks, queues, plans and step costs."""
