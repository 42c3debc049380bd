"""The packaged locustfile: `locust -f $(slobench locustfile)`, or `slobench web`."""

from loadgen.cli import standard_streams
from loadgen.web.locust_events import IdleUser, OpenLoop, listen

standard_streams.install()
listen()

__all__ = ["IdleUser", "OpenLoop"]
