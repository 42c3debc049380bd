"""What a run looks like while it runs: one view on stderr, drawn in the controlling process.

Percentiles here come from HdrHistograms fed with what the shards guess from raw bytes; the report
computes its own from the recorded rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hdrh.histogram import HdrHistogram
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadgen.records import Status
from loadgen.units import format_duration

_LOWEST_US, _HIGHEST_US, _DIGITS = 1, 600_000_000, 3
_PLAIN_EVERY_S = 5.0
NEVER_ASKED = (Status.not_released, Status.dropped)
"""How a request ends that no server was asked for."""


@dataclass
class Totals:
    """Sums over shards of what their beats say."""

    now_s: float = 0.0
    released: int = 0
    in_flight: int = 0
    waiting: int = 0
    by_status: list[int] = field(default_factory=lambda: [0] * len(Status))
    withdrawn: int = 0  # cancelled on purpose; among the ended, not among the failed

    @property
    def n_ended(self) -> int:
        """Of the requests that the server was asked: neither dropped by us nor never released."""
        return sum(self.by_status) - sum(self.by_status[status] for status in NEVER_ASKED)

    @property
    def n_failed(self) -> int:
        return self.n_ended - self.by_status[Status.ok] - self.withdrawn

    @property
    def n_dropped(self) -> int:
        return self.by_status[Status.dropped]


class Progress:
    """A live view on a terminal, a line every five seconds elsewhere. A context manager."""

    def __init__(self, console: Console, n_scheduled: int, window_s: float, offered_per_s: float):
        self._console, self._window_s, self._n = console, window_s, n_scheduled
        self._offered_per_s = offered_per_s
        self._beats: dict[int, dict[str, Any]] = {}
        self._ttft = HdrHistogram(_LOWEST_US, _HIGHEST_US, _DIGITS)
        self._lateness = HdrHistogram(_LOWEST_US, _HIGHEST_US, _DIGITS)
        self._live: Live | None = None
        self._note = ""
        self._next_line_s = _PLAIN_EVERY_S

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(self._view(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
            self._live.stop()

    def begin(self) -> None:
        """The first request is about to be sent; without a terminal a line says so."""
        if self._live is None:
            window = format_duration(self._window_s)
            self._console.print(f"sending {self._n} requests in {window}", soft_wrap=True)

    def beat(self, shard: int, message: dict[str, Any]) -> Totals:
        """Take in one shard's beat and draw; the totals as of now."""
        self._beats[shard] = message
        for histogram, key in ((self._ttft, "ttft_s"), (self._lateness, "lateness_s")):
            for seconds in message[key]:
                histogram.record_value(min(_HIGHEST_US, max(_LOWEST_US, round(seconds * 1e6))))
        totals = self.totals()
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
        elif totals.now_s >= self._next_line_s:
            self._next_line_s = totals.now_s + _PLAIN_EVERY_S
            self._console.print(" · ".join(self._facts(totals)), soft_wrap=True)
        return totals

    def note(self, text: str) -> None:
        """Something the user should see now, such as why the run is ending."""
        self._note = text
        if self._live is None:
            self._console.print(text, soft_wrap=True)

    def totals(self) -> Totals:
        beats = list(self._beats.values())
        return Totals(
            now_s=max((beat["now_s"] for beat in beats), default=0.0),
            released=sum(beat["released"] for beat in beats),
            in_flight=sum(beat["in_flight"] for beat in beats),
            waiting=sum(beat["waiting"] for beat in beats),
            by_status=[sum(column) for column in zip(*(b["by_status"] for b in beats), strict=True)]
            or [0] * len(Status),
            withdrawn=sum(beat["withdrawn"] for beat in beats),
        )

    def _facts(self, totals: Totals) -> list[str]:
        elapsed_s = min(totals.now_s, self._window_s)
        achieved = totals.released / elapsed_s if elapsed_s > 0 else 0.0
        facts = [
            f"{elapsed_s:.0f}/{self._window_s:.0f} s",
            f"sent {totals.released}/{self._n} "
            f"({achieved:.1f}/s, asked {self._offered_per_s:.1f}/s)",
            f"in flight {totals.in_flight}" + (f" +{totals.waiting}" if totals.waiting else ""),
            f"TTFT {_percentiles(self._ttft)}",
            f"failed {totals.n_failed}"
            + (f", dropped {totals.n_dropped}" if totals.n_dropped else "")
            + (f", cancelled on purpose {totals.withdrawn}" if totals.withdrawn else ""),
            f"send lateness {_percentiles(self._lateness)}",
        ]
        if totals.now_s > self._window_s:
            facts[0] = "draining"
        return facts

    def _view(self) -> Group:
        totals = self.totals()
        grid = Table.grid(padding=(0, 2))
        time, sent, in_flight, ttft, failed, lateness = self._facts(totals)
        bar = ProgressBar(self._window_s, min(totals.now_s, self._window_s), width=28)
        grid.add_row(bar, time, sent)
        grid.add_row(in_flight, failed, ttft)
        rows: list[Any] = [grid, Text(lateness, style="dim")]
        if self._note:
            rows.append(Text(self._note, style="yellow"))
        return Group(*rows)


def _percentiles(histogram: HdrHistogram) -> str:
    if not histogram.get_total_count():
        return "–"
    p50, p99 = (histogram.get_value_at_percentile(q) * 1e-6 for q in (50, 99))
    return f"p50 {format_duration(p50)}, p99 {format_duration(p99)}"
