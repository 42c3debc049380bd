"""A server's metrics once a second, while a run is under way.

One thread of the controlling process, far from the processes that measure: it fetches, keeps a few
numbers and sleeps. A scrape that fails or takes long is counted and delays nothing; instants that
passed meanwhile are left out.
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
_MOST_BYTES = 16 << 20

Row = tuple[float, str, float]  # seconds since the run epoch, series, value
Problem = (OSError, ValueError)  # TimeoutError is an OSError


@dataclass
class Scraped:
    """What came of it: rows in order of time, and how often it did not work, with the first
    reason."""

    rows: list[Row] = field(default_factory=list)
    n_scrapes: int = 0
    n_failed: int = 0
    reason: str = ""


class Source:
    """One URL over one kept-alive connection: the endpoint's own way and headers for its own
    origin, a direct connection without headers elsewhere."""

    def __init__(self, url: str, endpoint: Endpoint) -> None:
        self._url, is_own = url, endpoint.is_own(url)
        self._headers = list(endpoint.request_headers()) if is_own else []
        self._route = endpoint.route if is_own else _direct(url, endpoint)
        self._session: HttpSession | None = None

    async def read(self, timeout_s: float) -> dict[str, float]:
        """What the server says of itself now. Raises one of `Problem`."""
        if self._session is None:
            self._session = HttpSession(self._route)
        headers = [*self._headers, ("accept", "text/plain")]
        async with self._session.request("GET", self._url, headers, b"", timeout_s) as answer:
            if answer.status != 200:
                raise ValueError(f"answered {answer.status}")
            body = await answer.read(_MOST_BYTES + 1)
            if len(body) > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES >> 20} MiB of metrics")
        return read_metrics(body.decode("utf-8", "replace"))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


class Scraper:
    """Reads the sources from `start` to `stop`, at once and then each second of the run's clock."""

    def __init__(self, urls: Sequence[str], endpoint: Endpoint) -> None:
        self._urls, self._endpoint = urls, endpoint
        self._found = Scraped()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._epoch_ns = 0

    def start(self, epoch_ns: int) -> None:
        self._epoch_ns = epoch_ns
        self._thread = threading.Thread(target=self._run, name="server metrics", daemon=True)
        self._thread.start()

    def stop(self) -> Scraped:
        """What was read, the state after the run as the last."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_TIMEOUT_S + _LAST_S + 1.0)
        return self._found

    def _run(self) -> None:
        sources = [Source(url, self._endpoint) for url in self._urls]
        with asyncio.Runner() as runner:
            runner.run(self._scrape(sources, _TIMEOUT_S))
            while not self._stopped.wait(self._until_next_s()):
                runner.run(self._scrape(sources, _TIMEOUT_S))
            runner.run(self._scrape(sources, _LAST_S))
            for source in sources:
                source.close()

    def _until_next_s(self) -> float:
        now_s = self._now_s()
        return max(0.0, (now_s // PERIOD_S + 1) * PERIOD_S - now_s)

    def _now_s(self) -> float:
        return (time.monotonic_ns() - self._epoch_ns) * 1e-9

    async def _scrape(self, sources: Sequence[Source], timeout_s: float) -> None:
        """One reading of all sources, stamped when the last of them had answered."""
        self._found.n_scrapes += 1
        try:
            readings = await asyncio.gather(*(source.read(timeout_s) for source in sources))
        except Problem as error:
            self._found.n_failed += 1
            self._found.reason = self._found.reason or why(error, self._endpoint, timeout_s)
            return
        now_s = self._now_s()
        self._found.rows += [(now_s, name, value) for name, value in add_up(readings).items()]


async def find_metrics(
    endpoint: Endpoint, timeout_s: float = _TIMEOUT_S
) -> tuple[PreflightCheck, bool]:
    """Whether the server's metrics can be read, as a line of the preflight. A URL that a file names
    is worth a warning, the usual place is not: most servers have no metrics unless told to.
    """
    urls, known = endpoint.metrics_urls(), set[str]()
    if not urls:
        return PreflightCheck("server_metrics", None, "not asked for"), False
    for url in urls:
        found = await _try(Source(url, endpoint), endpoint, timeout_s)
        if isinstance(found, str):
            is_usual = endpoint.metrics_url is None
            said = endpoint.redact(f"{url} {found}")
            detail = f"{said}: the server's queue and KV use will not be known"
            return PreflightCheck(
                "server_metrics", None if is_usual else False, detail
            ), not is_usual
        known |= found.keys()
    names = sorted({name.partition("{")[0] for name in known})
    where = f"{endpoint.redact(urls[0])}{' and others' if len(urls) > 1 else ''}"
    return PreflightCheck("server_metrics", True, f"{where}: {', '.join(names)}"), True


async def _try(source: Source, endpoint: Endpoint, timeout_s: float) -> dict[str, float] | str:
    """One reading, or why there is none in a few words."""
    try:
        return await source.read(timeout_s) or "says nothing that is known here"
    except Problem as error:
        return why(error, endpoint, timeout_s)
    finally:
        source.close()


def _direct(url: str, endpoint: Endpoint) -> Route:
    address = parse_metrics_url(url)
    return Route(address.host, address.port, is_tls=address.ssl, ca_cert=endpoint.ca_cert)


def why(error: Exception, endpoint: Endpoint, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    return endpoint.error_text(error)
