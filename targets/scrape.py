"""The server's metrics, read once a second during a run.

A thread of the controlling process reads them, far from the processes that measure. A failed or
slow scrape is counted and delays nothing; seconds that pass during a slow scrape are skipped.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from targets.address import parse_metrics_url
from targets.endpoint import Endpoint
from targets.http_session import HttpSession
from targets.preflight_result import PreflightCheck
from targets.route import Route
from targets.server_metrics import add_up, read_metrics

PERIOD_S = 1.0
_TIMEOUT_S = 3.0
_LAST_S = 1.0  # for the scrape after the run
_MAX_BYTES = 16 << 20

Row = tuple[float, str, float]  # seconds since the run epoch, series, value
Problem = (OSError, ValueError)  # TimeoutError is an OSError


@dataclass
class Scraped:
    """The rows in order of time, and the number of failed scrapes with the first reason."""

    rows: list[Row] = field(default_factory=list)
    n_scrapes: int = 0
    n_failed: int = 0
    reason: str = ""


class Source:
    """A metrics URL on a kept-alive connection: with the endpoint's route and headers if the URL
    has the endpoint's origin, else direct and without headers."""

    def __init__(self, url: str, endpoint: Endpoint) -> None:
        self._url, is_own = url, endpoint.is_own(url)
        self._headers = list(endpoint.request_headers()) if is_own else []
        self._route = endpoint.route if is_own else _direct(url, endpoint)
        self._session: HttpSession | None = None

    async def read(self, timeout_s: float) -> dict[str, float]:
        """The present values by series. Raises one of `Problem`."""
        if self._session is None:
            self._session = HttpSession(self._route)
        headers = [*self._headers, ("accept", "text/plain")]
        async with self._session.request("GET", self._url, headers, b"", timeout_s) as response:
            if response.status != 200:
                raise ValueError(f"answered {response.status}")
            body = await response.read(_MAX_BYTES + 1)
            if len(body) > _MAX_BYTES:
                raise ValueError(f"more than {_MAX_BYTES >> 20} MiB of metrics")
        return read_metrics(body.decode("utf-8", "replace"))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


def until_next_s(now_s: float) -> float:
    """Seconds until the next reading, at the next full second."""
    return max(0.0, (now_s // PERIOD_S + 1) * PERIOD_S - now_s)


class Scraper:
    """Reads the sources at `start`, then at each second of the run's clock, and at `stop`."""

    def __init__(self, urls: Sequence[str], endpoint: Endpoint) -> None:
        self._urls, self._endpoint = urls, endpoint
        self._scraped = Scraped()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._epoch_ns = 0

    def start(self, epoch_ns: int) -> None:
        self._epoch_ns = epoch_ns
        self._thread = threading.Thread(target=self._run, name="server metrics", daemon=True)
        self._thread.start()

    def stop(self) -> Scraped:
        """All readings; the last is the state after the run."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_TIMEOUT_S + _LAST_S + 1.0)
        return self._scraped

    def _run(self) -> None:
        sources = [Source(url, self._endpoint) for url in self._urls]
        with asyncio.Runner() as runner:
            runner.run(self._scrape(sources, _TIMEOUT_S))
            while not self._stopped.wait(until_next_s(self._now_s())):
                runner.run(self._scrape(sources, _TIMEOUT_S))
            runner.run(self._scrape(sources, _LAST_S))
            for source in sources:
                source.close()

    def _now_s(self) -> float:
        return (time.monotonic_ns() - self._epoch_ns) * 1e-9

    async def _scrape(self, sources: Sequence[Source], timeout_s: float) -> None:
        """Read all sources; the row's time is the arrival of the last answer."""
        self._scraped.n_scrapes += 1
        try:
            readings = await asyncio.gather(*(source.read(timeout_s) for source in sources))
        except Problem as error:
            self._scraped.n_failed += 1
            problem = scrape_problem(error, self._endpoint, timeout_s)
            self._scraped.reason = self._scraped.reason or problem
            return
        now_s = self._now_s()
        self._scraped.rows += [(now_s, name, value) for name, value in add_up(readings).items()]


async def find_metrics(
    endpoint: Endpoint, timeout_s: float = _TIMEOUT_S
) -> tuple[PreflightCheck, bool]:
    """(a check for the preflight, whether to scrape). A URL in the target file that cannot be read
    is a warning; the usual place is not, because most servers have no metrics by default.
    """
    urls, names = endpoint.metrics_urls(), set[str]()
    if not urls:
        return PreflightCheck("server_metrics", None, "switched off"), False
    for url in urls:
        source = Source(url, endpoint)
        try:
            series = await source.read(timeout_s)
            problem = "" if series else "no known metric"
        except Problem as error:
            problem = scrape_problem(error, endpoint, timeout_s)
        finally:
            source.close()
        if problem:
            is_named = endpoint.metrics_url is not None
            detail = (
                f"{endpoint.redact(f'{url} {problem}')}: queue and KV use of the server are unknown"
            )
            return PreflightCheck("server_metrics", False if is_named else None, detail), is_named
        names |= {name.partition("{")[0] for name in series}
    where = f"{endpoint.redact(urls[0])}{' and others' if len(urls) > 1 else ''}"
    return PreflightCheck("server_metrics", True, f"{where}: {', '.join(sorted(names))}"), True


def _direct(url: str, endpoint: Endpoint) -> Route:
    address = parse_metrics_url(url)
    return Route(address.host, address.port, is_tls=address.ssl, ca_cert=endpoint.ca_cert)


def scrape_problem(error: Exception, endpoint: Endpoint, timeout_s: float) -> str:
    """The reason of a failed scrape in a few words."""
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    return endpoint.error_text(error)
