"""A warning, while the run goes on, that the load generator's own delays may make it INVALID."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgen.live.live_histogram import LiveCounts
from loadgen.manifest.sections import InstrumentLimits
from loadgen.manifest.self_report import (
    ClientReport,
    ConnectionsReport,
    DecodingReport,
    GcReport,
    LoopLag,
    SelfReport,
    ThreadUse,
)
from loadgen.measure.validity.causes import recorded_cause
from loadgen.measure.validity.client_checks import BEHIND_SHARE
from loadgen.measure.wording import format_share, format_value

_LEAST_SENT = 20
_SETTLED_S = 3.0  # before, the shares of a worker's time say little


class EarlyWarning:
    """Compares the load generator's delays so far with the limits of the report.

    `lateness_limit_s` is the p99 of sent − released above which the report marks the run;
    `window_s` is the length of the measured window.
    """

    def __init__(self, limits: InstrumentLimits, lateness_limit_s: float, window_s: float) -> None:
        self._limits, self._lateness_limit_s = limits, lateness_limit_s
        self._behind_s = max(BEHIND_SHARE * window_s, limits.lateness_s or 0.0)

    def text(self, lateness: LiveCounts | None, uses: Sequence[ThreadUse]) -> str | None:
        """The symptom, the cause of requests that leave late, and the remedy; None while every
        limit holds. `lateness` is None where requests wait for a slot, because that is no delay of
        the load generator."""
        settled = [use for use in uses if use.window_s >= _SETTLED_S]
        late, busy = self._late(lateness), self._busy(settled)
        symptom = late or busy
        if symptom is None:
            return None
        shards = tuple(_report(number, use) for number, use in enumerate(settled))
        cause = recorded_cause(ClientReport(shards), self._limits)
        if cause is None:
            return f"the run may become INVALID: {symptom}; the report names the cause"
        # A busy worker is the cause itself.
        reason = f"; {cause.text}: " if late else ": "
        return f"the run may become INVALID: {symptom}{reason}{cause.remedy}"

    def _late(self, lateness: LiveCounts | None) -> str | None:
        if lateness is None or lateness.n < _LEAST_SENT:
            return None
        behind_s, p99_s = lateness.quantile(1 - BEHIND_SHARE), lateness.quantile(0.99)
        if behind_s > self._behind_s:
            return (
                f"more than {format_share(BEHIND_SHARE)} of the requests leave over "
                f"{format_value(self._behind_s, 's')} late, so the server gets less load than "
                "planned"
            )
        if p99_s > self._lateness_limit_s:
            return (
                f"requests leave late, p99 {format_value(p99_s, 's')} (limit "
                f"{format_value(self._lateness_limit_s, 's')})"
            )
        return None

    def _busy(self, uses: Sequence[ThreadUse]) -> str | None:
        limits = self._limits
        for shares, limit, meaning in (
            ([u.throttled_share for u in uses], limits.run_delay_share, "throttled by its quota"),
            ([u.cpu_share for u in uses], limits.cpu_share, "busy on its core"),
            ([u.run_delay_share for u in uses], limits.run_delay_share, "waiting for a core"),
        ):
            share = max((share or 0.0 for share in shares), default=0.0)
            if share > limit:
                return (
                    f"a worker is {meaning} {format_share(share)} of the time (limit "
                    f"{format_share(limit)})"
                )
        return None


def thread_use(
    window_s: float | None, cpu: float | None, delay: float | None, throttled: float | None
) -> ThreadUse:
    """The use of its core that a worker reports during the run (`ThreadMeter.so_far`)."""
    return ThreadUse(window_s or 0.0, cpu, delay, throttled, None, None)


def _report(number: int, use: ThreadUse) -> SelfReport:
    """A worker's report as far as it is known during the run."""
    return SelfReport(
        **msgspec.structs.asdict(use),
        shard=number,
        broken="",
        loop_lag_s=LoopLag(n=0, p50=0.0, p99=0.0, max=0.0),
        stalls=None,
        backlog=None,
        processor=None,
        gc=GcReport(collections=0, pause_max_s=0.0),
        decoding=DecodingReport(cpu_s=0.0, wall_s=0.0),
        connections=ConnectionsReport(opened=0, reused=0, known=()),
        encoded_late=0,
        spilled_bytes=0,
    )
