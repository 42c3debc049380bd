"""The packaged locustfile: `locust -f $(slobench locustfile)`, or `slobench web`."""

from loadgen.web.locust_events import IdleUser, OpenLoop, listen

listen()

__all__ = ["IdleUser", "OpenLoop"]
