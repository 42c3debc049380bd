"""Live view of a run on stderr, drawn by the controlling process.

Its percentiles are estimates from undecoded bytes; the report's come from the decoded rows. The
view takes less than 1 % of a core (`benchmarks/live_view.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadgen.drive.live_histogram import LiveCounts
from loadgen.manifest.json_section import JsonObject
from loadgen.records import Status
from loadgen.units import format_duration

_PLAIN_EVERY_S = 5.0
_DRAW_EVERY_S = 0.5
_BAR = 28
NEVER_SENT = (Status.not_released, Status.dropped)
"""Statuses of requests that the server never received."""


@dataclass
class Totals:
    """Sums over the shards' latest progress messages."""

    now_s: float
    by_status: list[int]
    released: int
    in_flight: int
    waiting: int
    withdrawn: int  # cancelled on purpose: counted as ended, not as failed
    measured: int  # released after the warm-up
    failed_alike: Sequence[tuple[int, int, str]] = ()  # by shard: `FirstFailures.message`

    @property
    def n_ended(self) -> int:
        """Ended requests, without those that were dropped or never released."""
        return sum(self.by_status) - sum(self.by_status[status] for status in NEVER_SENT)

    @property
    def n_failed(self) -> int:
        """Ended without success, except those that the load generator cancelled."""
        return self.n_ended - self.by_status[Status.ok] - self.by_status[Status.cancelled]

    @property
    def n_unfinished(self) -> int:
        """Cancelled at the end of the drain."""
        return self.by_status[Status.cancelled] - self.withdrawn

    @property
    def n_dropped(self) -> int:
        return self.by_status[Status.dropped]


class Progress:
    """The live view: redrawn on a terminal, elsewhere a line every 5 s. A context manager.

    A closed loop plans more requests than it sends, so its view has no number and no rate of
    planned requests. `n_measured`: so many requests after the warm-up end the window; the view then
    counts them.
    """

    def __init__(
        self,
        console: Console,
        n_scheduled: int,
        window_s: float,
        is_closed_loop: bool,
        n_measured: int | None = None,
    ) -> None:
        self._console, self._window_s, self._n = console, window_s, n_scheduled
        self._is_closed_loop, self._n_measured = is_closed_loop, n_measured
        self._beats: dict[int, JsonObject] = {}
        self._ttft, self._lateness = LiveCounts(), LiveCounts()
        self._live: Live | None = None
        self._note = ""
        self._next_line_s, self._next_draw_s = _PLAIN_EVERY_S, 0.0

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
        """Announces the first request, where there is no terminal."""
        if self._live is None:
            window = format_duration(self._window_s)
            number = f"{'up to ' if self._is_closed_loop else ''}{self._n} requests in {window}"
            if self._n_measured is not None:
                number = f"{self._n_measured} measured requests in at most {window}"
            self._console.print(f"sending {number}", soft_wrap=True)

    def beat(self, shard: int, message: JsonObject) -> Totals:
        """Adds a progress message of a shard, draws, and returns the current totals."""
        self._beats[shard] = message
        self._ttft.add(message["ttft_s"])
        self._lateness.add(message["lateness_s"])
        totals = self.totals()
        if self._live is not None:
            if totals.now_s >= self._next_draw_s:
                self._next_draw_s = totals.now_s + _DRAW_EVERY_S
                self._live.update(self._view(), refresh=True)
        elif totals.now_s >= self._next_line_s:
            self._next_line_s = totals.now_s + _PLAIN_EVERY_S
            self._console.print(" · ".join(self._facts(totals)), soft_wrap=True)
        return totals

    def note(self, text: str) -> None:
        """Shows a message at once, such as the reason why the run ends early."""
        self._note = text
        if self._live is None:
            self._console.print(text, soft_wrap=True)

    def totals(self) -> Totals:
        beats = self._beats.values()
        now_s = max((beat["now_s"] for beat in beats), default=0.0)
        columns = zip(*(beat["by_status"] for beat in beats), strict=True)
        by_status = [sum(column) for column in columns] or [0] * len(Status)
        summed = ("released", "in_flight", "waiting", "withdrawn", "measured")
        alike = [tuple(beat["failed_alike"]) for beat in beats if "failed_alike" in beat]
        sums = {key: sum(beat[key] for beat in beats) for key in summed}
        return Totals(now_s, by_status, **sums, failed_alike=alike)

    def _facts(self, totals: Totals) -> list[str]:
        elapsed_s = min(totals.now_s, self._window_s)
        achieved = totals.released / elapsed_s if elapsed_s > 0 else 0.0
        sent = f"sent {totals.released} ({achieved:.1f}/s)"
        if not self._is_closed_loop and self._n_measured is None:
            offered = f"offered {self._n / self._window_s:.1f}/s"
            sent = f"sent {totals.released}/{self._n} ({achieved:.1f}/s, {offered})"
        facts = [
            f"{elapsed_s:.0f}/{self._window_s:.0f} s",
            sent,
            f"in flight {totals.in_flight}" + (f" +{totals.waiting}" if totals.waiting else ""),
            f"TTFT {_percentiles(self._ttft)}",
            f"failed {totals.n_failed}"
            + (f", dropped {totals.n_dropped}" if totals.n_dropped else "")
            + (f", unfinished {totals.n_unfinished}" if totals.n_unfinished else "")
            + (f", cancelled on purpose {totals.withdrawn}" if totals.withdrawn else ""),
            f"send lateness {_percentiles(self._lateness)}",
        ]
        if self._n_measured is not None:
            facts[0] = f"{totals.measured}/{self._n_measured} measured requests"
        if totals.now_s > self._window_s or self._share(totals) >= 1:
            facts[0] = "draining"
        return facts

    def _share(self, totals: Totals) -> float:
        """The share of the run that is over."""
        if self._n_measured is not None:
            return totals.measured / self._n_measured
        return totals.now_s / self._window_s

    def _view(self) -> Text:
        """Plain text, because the layout of a rich table takes three times as long."""
        totals = self.totals()
        time, sent, in_flight, ttft, failed, lateness = self._facts(totals)
        done = round(_BAR * min(1.0, self._share(totals)))
        width = max(len(time), len(failed))
        view = Text(no_wrap=True, overflow="ellipsis")
        view.append("━" * done, "green").append("━" * (_BAR - done), "dim")
        view.append(f"  {time:{width}}  {sent}\n")
        view.append(f"{in_flight:{_BAR}}  {failed:{width}}  {ttft}\n").append(lateness, "dim")
        if self._note:
            view.append(f"\n{self._note}", "yellow")
        return view


def _percentiles(counts: LiveCounts) -> str:
    if not counts.n:
        return "–"
    p50, p99 = counts.quantile(0.5), counts.quantile(0.99)
    return f"p50 {format_duration(p50)}, p99 {format_duration(p99)}"
