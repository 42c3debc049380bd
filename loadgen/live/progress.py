"""Live view of a run on stderr, drawn by the controlling process: a dashboard on a terminal, lines
elsewhere.

Its percentiles are estimates from undecoded bytes; the report's come from the decoded rows. The
view takes 0.2 to 0.4 % of a core at 20 to 400 requests/s (`benchmarks/live_view.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.segment import Segment

from loadgen.live.early_warning import EarlyWarning, thread_use
from loadgen.live.live_histogram import LiveCounts
from loadgen.live.run_figures import RunFigures
from loadgen.live.slo_so_far import SloSoFar, Tally
from loadgen.manifest.json_section import JsonObject
from loadgen.manifest.self_report import ThreadUse
from loadgen.measure.catalog import METRICS
from loadgen.measure.wording import format_count, format_number, format_share, format_value
from loadgen.records import Status
from loadgen.units import format_duration

_PLAIN_EVERY_S = 5.0
_DRAW_EVERY_S = 1.0
_BAR = 28
_SLO_BAR = 20
_MOST_ROWS = 8  # of SLOs, and of classes
_SPARKS = "▁▂▃▄▅▆▇█"
_FAILED = (
    *(Status.http_error, Status.timeout, Status.stream_error, Status.connect_error, Status.lost),
    Status.truncated,
)
NEVER_SENT = (Status.not_released, Status.dropped)
"""Statuses of requests that the server never received."""


class View:
    """Text with styles, cropped at the width of the terminal. The layout of rich's Text takes three
    times as long, that of its tables nine times."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, str]] = []

    def append(self, text: str, style: str = "") -> View:
        self._parts.append((text, style))
        return self

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style in self._parts:
            yield Segment(text, console.get_style(style) if style else None)


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
    heard_s: float | None = None  # when the last byte came; None: a worker does not state it
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
    counts them. With `figures` the view shows SLOs, latencies over time and classes, with `warning`
    the delays of the load generator that may make the run INVALID.
    """

    def __init__(
        self,
        console: Console,
        n_scheduled: int,
        window_s: float,
        is_closed_loop: bool,
        n_measured: int | None = None,
        figures: RunFigures | None = None,
        warning: EarlyWarning | None = None,
        is_streamed: bool = True,
    ) -> None:
        self._is_streamed = is_streamed
        self._figures, self._warning = figures, warning
        self._uses: dict[int, ThreadUse] = {}
        self._has_waited = False
        self._warned = ""
        self._console, self._window_s, self._n = console, window_s, n_scheduled
        self._is_closed_loop, self._n_measured = is_closed_loop, n_measured
        self._beats: dict[int, JsonObject] = {}
        self._waits, self._lateness = LiveCounts(), LiveCounts()
        self._live: Live | None = None
        self._note = ""
        self._quiet_s = 0.0
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
        self._waits.add(message["ttft_s" if self._is_streamed else "e2e_s"])
        self._lateness.add(message["lateness_s"])
        self._has_waited |= message["waiting"] > 0
        if "use" in message:
            self._uses[shard] = thread_use(*message["use"])
        if self._figures is not None:
            self._figures.take(message["now_s"], message.get("ended", ()))
        totals = self.totals()
        if self._live is not None:
            if totals.now_s >= self._next_draw_s:
                self._next_draw_s = totals.now_s + _DRAW_EVERY_S
                self._live.update(self._view(), refresh=True)
        elif totals.now_s >= self._next_line_s:
            self._next_line_s = totals.now_s + _PLAIN_EVERY_S
            facts = [*self._facts(totals), *self._figures_in_line()]
            self._console.print(" · ".join(facts), soft_wrap=True)
            warning = self._present_warning()
            if warning and not self._warned:
                self._console.print(f"warning: {warning}", soft_wrap=True)
            self._warned = warning
        return totals

    def quiet(self, for_s: float) -> None:
        """Shows from now on how long no byte has come from the server; 0: it answers."""
        self._quiet_s = for_s

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
        heard = [beat.get("heard_s") for beat in beats]
        known_s = [at_s for at_s in heard if at_s is not None]
        heard_s = max(known_s) if known_s and len(known_s) == len(heard) else None
        return Totals(now_s, by_status, **sums, heard_s=heard_s, failed_alike=alike)

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
            f"{'TTFT' if self._is_streamed else 'E2E'} {_percentiles(self._waits)}",
            f"failed {totals.n_failed}"
            + (f", dropped {totals.n_dropped}" if totals.n_dropped else "")
            + (f", unfinished {totals.n_unfinished}" if totals.n_unfinished else "")
            + (f", cancelled on purpose {totals.withdrawn}" if totals.withdrawn else ""),
            f"send lateness {_percentiles(self._lateness)}",
        ]
        if self._n_measured is not None:
            facts[0] = f"{totals.measured}/{self._n_measured} measured requests"
        if self._quiet_s:
            facts[2] += f", NO BYTE for {self._quiet_s:.0f} s"
        if totals.now_s > self._window_s or self._share(totals) >= 1:
            facts[0] = "draining"
        return facts

    def _share(self, totals: Totals) -> float:
        """The share of the run that is over."""
        if self._n_measured is not None:
            return totals.measured / self._n_measured
        return totals.now_s / self._window_s

    def _figures_in_line(self) -> list[str]:
        """TPOT (and TTFAT, if it is not TTFT), tokens per second and the SLOs, for the line of a
        run without a terminal."""
        if self._figures is None:
            return []
        before = " before" if self._quiet_s else ""
        slos = [
            f"{_name(slo)} {slo.shown} {_WORDS[slo.is_met]}{before if slo.is_met else ''}"
            for slo in self._figures.slos()
        ]
        latencies = [
            f"{METRICS[metric].title} {_percentiles(self._figures.latencies[metric])}"
            for metric in self._figures.shown
            if metric != "ttft_s"  # among the facts
        ]
        return [
            *(latencies if self._is_streamed else []),
            self._speed(self._figures),
            *slos[:_MOST_ROWS],
        ]

    def _speed(self, figures: RunFigures) -> str:
        """Tokens per second; of whole answers, whose tokens are not counted here, the answers."""
        unit = "tokens" if self._is_streamed else "answers"
        return f"{format_number(figures.tokens_per_s)} {unit}/s"

    def _present_warning(self) -> str:
        if self._warning is None:
            return ""
        lateness = None if self._has_waited else self._lateness
        return self._warning.text(lateness, list(self._uses.values())) or ""

    def _view(self) -> View:
        totals = self.totals()
        time, sent, in_flight, waits, failed, lateness = self._facts(totals)
        done = round(_BAR * min(1.0, self._share(totals)))
        view = View()
        view.append("━" * done, "green").append("━" * (_BAR - done), "dim")
        if self._figures is None:
            width = max(len(time), len(failed))
            view.append(f"  {time:{width}}  {sent}\n")
            view.append(f"{in_flight:{_BAR}}  {failed:{width}}  {waits}\n").append(lateness, "dim")
        else:
            left_s = self._window_s - totals.now_s
            left = f", {left_s:.0f} s left" if left_s > 0 and self._n_measured is None else ""
            view.append(f"  {time}{left}\n")
            self._draw_slos(view, self._figures.slos())
            if self._is_streamed:
                self._draw_latencies(view, self._figures)
            self._draw_traffic(view, self._figures, totals)
            if len(self._figures.classes) > 1:
                _draw_classes(view, self._figures)
            view.append(lateness, "dim")
        if self._quiet_s:
            text = f"\n! no byte from the server for {self._quiet_s:.0f} s"
            view.append(f"{text}, {totals.in_flight} requests in flight", "bold red")
        if warning := self._present_warning():
            view.append(f"\n! {warning}", "bold red")
        if self._note:
            view.append(f"\n{self._note}", "yellow")
        return view

    @staticmethod
    def _draw_slos(view: View, slos: Sequence[SloSoFar]) -> None:
        width = max((len(_name(slo)) for slo in slos[:_MOST_ROWS]), default=0)
        for slo in slos[:_MOST_ROWS]:
            style = {True: "green", False: "bold red", None: "dim"}[slo.is_met]
            share = slo.share_of_limit
            filled = 0 if share is None else round(_SLO_BAR * min(1.0, share))
            limit = format_value(slo.limit, slo.unit)
            sign = "≤" if slo.operator == "<=" else "≥"
            view.append(f"{_MARKS[slo.is_met]} {_name(slo):{width}}  {slo.shown:>14}", style)
            view.append(f"  {sign} {limit:<8} ")
            view.append("█" * filled, style).append("░" * (_SLO_BAR - filled), "dim")
            if share is not None and not math.isinf(share):
                view.append(f" {100 * share:.0f} % of the limit", "dim")
            view.append(f"  {_WORDS[slo.is_met]}\n", style)
        if len(slos) > _MOST_ROWS:
            view.append(f"  and {len(slos) - _MOST_ROWS} more SLOs\n", "dim")

    @staticmethod
    def _draw_latencies(view: View, figures: RunFigures) -> None:
        for metric in figures.shown:
            counts = figures.latencies[metric]
            view.append(f"{METRICS[metric].title:5} {_percentiles(counts):34}")
            view.append(f" {sparkline(figures.over_time[metric])}", "cyan")
            view.append(" p99 over time\n" if figures.over_time[metric] else "\n", "dim")

    def _draw_traffic(self, view: View, figures: RunFigures, totals: Totals) -> None:
        elapsed_s = min(totals.now_s, self._window_s)
        achieved = totals.released / elapsed_s if elapsed_s > 0 else 0.0
        requested = figures.requested_per_s
        shown = "rate" if requested is None else f"rate requested {format_number(requested)}/s,"
        in_flight = format_count(totals.in_flight)
        waiting = f" + {format_count(totals.waiting)} waiting" if totals.waiting else ""
        view.append(
            f"{shown} achieved {format_number(achieved)}/s · "
            f"{self._speed(figures)} · in flight {in_flight}{waiting}\n"
        )
        n_planned = "" if self._is_closed_loop else f" of {format_count(self._n)}"
        view.append(f"sent {format_count(totals.released)}{n_planned} · ")
        view.append(f"{format_count(totals.by_status[Status.ok])} ok", "green").append(" · ")
        view.append(_failures(totals), "red" if totals.n_failed or totals.n_dropped else "")
        view.append("\n")


_MARKS = {True: "✓", False: "✗", None: "·"}
_WORDS = {True: "ok", False: "MISSED", None: "no value yet"}


def sparkline(values: Sequence[float]) -> str:
    """A character per value, from 0 to the largest; a blank for NaN."""
    most = max((value for value in values if not math.isnan(value)), default=0.0)
    if most <= 0:
        return ""
    top = len(_SPARKS) - 1
    return "".join(" " if math.isnan(v) else _SPARKS[round(top * v / most)] for v in values)


def _name(slo: SloSoFar) -> str:
    return f"{slo.class_name}: {slo.text}" if slo.class_name else slo.text


def _failures(totals: Totals) -> str:
    """The failed requests by kind."""
    kinds = [
        f"{totals.by_status[status]} {status.name.replace('_', ' ')}"
        for status in _FAILED
        if totals.by_status[status]
    ]
    text = f"{format_count(totals.n_failed)} failed"
    text += f" ({', '.join(kinds)})" if kinds else ""
    for n, word in (
        (totals.n_dropped, "dropped"),
        (totals.n_unfinished, "unfinished"),
        (totals.withdrawn, "cancelled on purpose"),
    ):
        text += f" · {format_count(n)} {word}" if n else ""
    return text


def _draw_classes(view: View, figures: RunFigures) -> None:
    rows = list(zip(figures.classes, figures.by_class, strict=True))[:_MOST_ROWS]
    width = max(len(name) for name, _ in rows)
    titles = "  ".join(f"{METRICS[metric].title} p99" for metric in figures.shown)
    view.append(f"{'class':{width}}     ok  failed  met SLO  {titles}\n", "dim")
    for name, tally in rows:
        view.append(
            f"{name:{width}} {_class_row(tally, figures.shown)}\n", "red" if tally.n_failed else ""
        )
    if len(figures.classes) > _MOST_ROWS:
        view.append(f"and {len(figures.classes) - _MOST_ROWS} more classes\n", "dim")


def _class_row(tally: Tally, shown: Sequence[str]) -> str:
    met = format_share(tally.n_met / tally.n) if tally.n else "–"
    titles = [f"{METRICS[metric].title} p99" for metric in shown]
    p99s = [format_value(tally.latencies[metric].quantile(0.99), "s") for metric in shown]
    cells = [f"{p99:>{len(title)}}" for p99, title in zip(p99s, titles, strict=True)]
    return f"{tally.n_ok:6} {tally.n_failed:7}  {met:>7}  {'  '.join(cells)}"


def _percentiles(counts: LiveCounts) -> str:
    if not counts.n:
        return "–"
    p50, p99 = counts.quantile(0.5), counts.quantile(0.99)
    return f"p50 {format_duration(p50)}, p99 {format_duration(p99)}"
