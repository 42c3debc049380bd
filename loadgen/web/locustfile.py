"""The locustfile that slobench brings: `locust -f $(slobench locustfile)`, or `slobench web`."""

from loadgen.web.wiring import OpenLoop, Shard, listen

listen()

__all__ = ["OpenLoop", "Shard"]
