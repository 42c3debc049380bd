"""The locustfile that slobench brings: `locust -f $(slobench locustfile)`, or `slobench web`."""

from loadgen.web.locust_events import OpenLoop, Shard, listen

listen()

__all__ = ["OpenLoop", "Shard"]
