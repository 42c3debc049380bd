"""Why the requests of a measured run waited, from what the engine's /metrics said meanwhile."""

from __future__ import annotations

import re

import numpy as np

from loadgen.records import Run

_SERIES = re.compile(r'wait_s\{reason="(?P<reason>[^"]+)"\}')


def read_waits(run: Run) -> dict[str, dict[str, float]]:
    """Seconds of waiting by reason since the end of warm-up, under the name "" for all classes,
    which the counters do not tell apart; empty where no server stated them."""
    rows, start_s = run.server_rows, run.manifest.window.warmup_s
    waits: dict[str, float] = {}
    for series_id, name in enumerate(run.names.series):
        match = _SERIES.fullmatch(name)
        mine = rows[rows["series_id"] == series_id]
        if match is None or not len(mine):
            continue
        before = mine["value"][mine["t_s"] <= start_s]
        first = float(before[-1]) if len(before) else 0.0
        waits[match["reason"]] = float(np.max(mine["value"])) - first
    return {"": waits} if waits else {}
