"""The packaged locustfile: `locust -f $(slobench locustfile)`, or `slobench web`."""

from loadgen.cli import standard_streams
from loadgen.web.locust_beside import IdleUser
from loadgen.web.locust_events import OpenLoop, listen

standard_streams.install()
listen()

__all__ = ["IdleUser", "OpenLoop"]
