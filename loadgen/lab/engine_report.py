"""The engine section of a run's page, from the bundled engine's log."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from loadgen.archive import checksums
from loadgen.archive.request_names import RequestNames
from loadgen.errors import UsageError
from loadgen.lab.engine_log import misses_in
from loadgen.measure.attainment import measured_window
from loadgen.records import Run
from reference_engine.accounting.explain import Account
from reference_engine.state.plan import Why
from reference_engine.step_log.log_replay import replay
from reference_engine.step_log.step_files import EVENTS, STEPS, read_log
from reports.run.engine_section import EngineSection, MissReason

MOST_BINS, STEPS_A_BIN = 300, 8
MOST_STEPS = 20_000  # replayed for a page at most
MOST_SIMULATED = 100_000
"""Simulated steps of other modes, in total: 40 to 90 µs each, so some seconds of a core. Enough to
try every mode on a run of 12 500 steps; with fewer, some causes stayed unknown."""
N_BLOCKERS = 10
N_CULPRITS = 3
_FULL = "--engine log_level=full adds which requests delayed others, and why SLOs were missed."
_OTHER_SLO = "The causes of misses are computed only for the run's own SLO."
_COLUMNS = ("t_s", "end_s", "n_prefill_tokens", "n_decode", "kv_used_blocks", "causes")
Floats = NDArray[np.float64]


def engine_section(directory: Path, run: Run, is_own_slo: bool = True) -> EngineSection | None:
    """None if the bundled engine left no log in the run directory; only a note if the log cannot be
    read. Misses are those of the run's own SLO: a page with another SLO (`is_own_slo` False) omits
    them."""
    if not (directory / STEPS).is_file() or not (directory / EVENTS).is_file():
        return None
    checksums.check_read(directory, STEPS, EVENTS)
    try:
        column, n_blocks = _columns(directory / STEPS), _n_blocks(directory / EVENTS)
    except (pa.ArrowException, OSError, KeyError, json.JSONDecodeError) as error:
        return EngineSection([], [], {}, note=f"The engine's log cannot be read: {error}")
    if not len(column["t_s"]):
        return None
    t_s, end_s, prefill, decode, kv = (column[name].to_numpy() for name in _COLUMNS[:-1])
    waited = _waited(column["causes"], np.diff(t_s, append=end_s[-1]))
    start_s = measured_window(run).start_s
    waits = {reason: float(seconds[t_s >= start_s].sum()) for reason, seconds in waited.items()}
    ordered = {r: waits[r] for r in sorted(waits, key=lambda r: -waits[r]) if waits[r] > 0}
    n_bins = min(MOST_BINS, max(1, len(t_s) // STEPS_A_BIN))
    edges = np.linspace(0.0, max(float(end_s[-1]), 1e-3), n_bins + 1)

    def per_bin(amounts: Any) -> Floats:
        """Amounts of the steps as a rate, each spread until the next step was planned."""
        total = np.interp(edges, [*t_s, end_s[-1]], np.r_[0.0, np.cumsum(amounts)])
        rate: Floats = np.diff(total) / np.diff(edges)
        return rate

    bins = {"prefill": per_bin(prefill), "decode": per_bin(decode)}
    kv_peaks = _largest(t_s, kv, edges) / max(1, n_blocks)
    return EngineSection(
        bins=[
            {
                "from_s": float(edges[k]),
                "to_s": float(edges[k + 1]),
                "kv": None if np.isnan(kv_peaks[k]) else float(kv_peaks[k]),
                **{name: float(values[k]) for name, values in bins.items()},
            }
            for k in range(n_bins)
        ],
        waiting=[
            {
                "from_s": float(edges[k]),
                "to_s": float(edges[k + 1]),
                "reason": reason,
                "requests": float(requests),
            }
            for reason in ordered
            for k, requests in enumerate(per_bin(waited[reason]))
        ],
        waits_s=ordered,
        **_explained(directory, run, len(t_s), is_own_slo),
    )


def _waited(causes: Any, durations_s: Floats) -> dict[str, Floats]:
    """Request-seconds of waiting after each step, by reason in words: waiting requests × time until
    the next step was planned."""
    step = np.repeat(np.arange(len(causes)), causes.value_lengths().to_numpy())
    waiting = causes.flatten()
    names = waiting.field("reason").to_pylist()
    requests = waiting.field("requests").to_numpy()
    by_reason: dict[str, Floats] = {}
    for name in sorted(set(names)):
        has_reason = np.array([reason == name for reason in names])
        seconds = np.zeros(len(durations_s))
        np.add.at(seconds, step[has_reason], requests[has_reason])
        by_reason[str(Why[name]) if name in Why.__members__ else name] = seconds * durations_s
    return by_reason


def _largest(t_s: Floats, values: NDArray[Any], edges: Floats) -> Floats:
    """The largest value of each bin; NaN for an empty bin."""
    largest = np.full(len(edges) - 1, -np.inf)
    bins = np.searchsorted(edges, t_s, side="right") - 1
    inside = (bins >= 0) & (bins < len(largest))
    np.maximum.at(largest, bins[inside], values[inside])
    return np.where(np.isfinite(largest), largest, np.nan)


def _columns(path: Path) -> dict[str, Any]:
    """Arrow arrays by name. Raises pyarrow's errors for a damaged file, KeyError for a file of
    another kind."""
    with parquet.ParquetFile(path) as file:
        table = file.read(columns=list(_COLUMNS))
    return {name: table.column(name).combine_chunks() for name in _COLUMNS}


def _n_blocks(path: Path) -> int:
    """Number of the engine's KV blocks, from its first event; 0 if absent. Other events stay in
    Arrow: in a full log they hold every prompt."""
    table = parquet.read_table(path, columns=["detail"], filters=[("kind", "=", "start")])
    return int(json.loads(table["detail"][0].as_py()).get("n_blocks", 0)) if len(table) else 0


def _explained(directory: Path, run: Run, n_steps: int, is_own_slo: bool) -> dict[str, Any]:
    """The parts that need a replay of the engine's decisions; else a note with the reason for their
    absence."""
    if n_steps > MOST_STEPS:
        return {"note": f"{n_steps} steps are too many to replay for a page (limit {MOST_STEPS})."}
    try:
        log = read_log(directory)
        replayed = replay(log)
        if not replayed.is_identical:
            return {"note": f"The replay differs from the engine's log: {replayed.sentence()}."}
        names = RequestNames.of(run)
        missed = misses_in(log, replayed.accounts, run, MOST_SIMULATED) if is_own_slo else None
    except UsageError as error:
        return {"note": _FULL if "log_level" in str(error) else str(error)}
    return {
        "blockers": [
            (names.readable(words), waited_s) for words, waited_s in _blockers(replayed.accounts)
        ],
        "why": {
            request_id: names.readable(entry.sentence())
            for entry in replayed.accounts
            if (request_id := names.request_id(entry.request_id)) is not None
        },
        "misses": [
            MissReason(cause, named.total(), named.most_common(N_CULPRITS))
            for cause, named in ({} if missed is None else missed.by_cause()).items()
            if named
        ],
        "note": _OTHER_SLO if missed is None else "",
    }


def _blockers(accounts: Sequence[Account]) -> list[tuple[str, float]]:
    """The requests that delayed others for the longest time, in words."""
    seconds: defaultdict[str, float] = defaultdict(float)
    words: dict[str, str] = {}
    for entry in accounts:
        words |= {blocker.request_id: str(blocker) for blocker in entry.blockers}
        for cause, waited_s in entry.waits:
            if cause.blocker:
                seconds[cause.blocker] += waited_s
    longest = Counter(seconds).most_common(N_BLOCKERS)
    return [(words.get(name, name), waited_s) for name, waited_s in longest]
