"""The bundled engine's log of a run, as the run's page tells it."""

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

from loadgen.drive.payloads import request_name
from loadgen.errors import UsageError
from loadgen.lab.misses import misses_in
from loadgen.measure.attainment import measured_window
from loadgen.records import Run
from reference_engine.accounting.explain import Account
from reference_engine.state.plan import Why
from reference_engine.step_log.log_replay import replay
from reference_engine.step_log.step_files import EVENTS, STEPS, read_log
from reports.run.engine_section import EngineSection, MissReason

MOST_BINS, STEPS_A_BIN = 300, 8
MOST_STEPS = 20_000  # decided again for a page
MOST_SIMULATED = 100_000
"""Steps of other modes, all together: 40 to 90 µs each, so some seconds of a core. Enough to ask
every mode about a run of 12 500 steps; with fewer, whose fault misses are stayed unsettled."""
N_BLOCKERS = 10
N_CULPRITS = 3
_FULL = "--engine log_level=full also tells who held up whom, and whose fault missed promises are."
_OTHERS = "Whose fault missed promises are is only told of the promises that the run was made with."
_COLUMNS = ("t_s", "end_s", "n_prefill_tokens", "n_decode", "kv_used_blocks", "causes")
Floats = NDArray[np.float64]


def engine_section(directory: Path, run: Run, is_own_promise: bool = True) -> EngineSection | None:
    """None where the bundled engine left no log beside the run; only a note where it cannot be
    read. Misses are those of the run's own promises: a run judged by others (`is_own_promise`
    False) is told without."""
    if not (directory / STEPS).is_file() or not (directory / EVENTS).is_file():
        return None
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
    most = _largest(t_s, kv, edges) / max(1, n_blocks)
    return EngineSection(
        bins=[
            {
                "from_s": float(edges[k]),
                "to_s": float(edges[k + 1]),
                "kv": None if np.isnan(most[k]) else float(most[k]),
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
        **_explained(directory, run, len(t_s), is_own_promise),
    )


def _waited(causes: Any, lasted_s: Floats) -> dict[str, Floats]:
    """Request-seconds that each step left waiting, by reason in words: requests left × how long
    until the next step was planned."""
    step = np.repeat(np.arange(len(causes)), causes.value_lengths().to_numpy())
    told = causes.flatten()
    names = told.field("reason").to_pylist()
    requests = told.field("requests").to_numpy()
    found: dict[str, Floats] = {}
    for name in sorted(set(names)):
        of = np.array([one == name for one in names])
        seconds = np.zeros(len(lasted_s))
        np.add.at(seconds, step[of], requests[of])
        found[str(Why[name]) if name in Why.__members__ else name] = seconds * lasted_s
    return found


def _largest(t_s: Floats, values: NDArray[Any], edges: Floats) -> Floats:
    """The largest value of each bin, NaN where it has none."""
    largest = np.full(len(edges) - 1, -np.inf)
    bins = np.searchsorted(edges, t_s, side="right") - 1
    inside = (bins >= 0) & (bins < len(largest))
    np.maximum.at(largest, bins[inside], values[inside])
    return np.where(np.isfinite(largest), largest, np.nan)


def _columns(path: Path) -> dict[str, Any]:
    """Arrow arrays by name. Raises what pyarrow does for a damaged file, KeyError for another."""
    with parquet.ParquetFile(path) as file:
        table = file.read(columns=list(_COLUMNS))
    return {name: table.column(name).combine_chunks() for name in _COLUMNS}


def _n_blocks(path: Path) -> int:
    """KV blocks of the engine, as its first event tells; 0 where it does not. Other events stay in
    Arrow: of a full log they hold every prompt."""
    table = parquet.read_table(path, columns=["detail"], filters=[("kind", "=", "start")])
    return int(json.loads(table["detail"][0].as_py()).get("n_blocks", 0)) if len(table) else 0


def _explained(directory: Path, run: Run, n_steps: int, is_own_promise: bool) -> dict[str, Any]:
    """What needs the engine's decisions once more; else the reason why there is none of it."""
    if n_steps > MOST_STEPS:
        return {"note": f"{n_steps} steps are too many to decide again for a page."}
    try:
        log = read_log(directory)
        again = replay(log)
        if not again.is_identical:
            return {"note": f"The engine's log does not decide the same again: {again.sentence()}."}
        name = request_name(run.manifest.run)
        missed = misses_in(log, again.accounts, run, MOST_SIMULATED) if is_own_promise else None
    except UsageError as error:
        return {"note": _FULL if "log_level" in str(error) else str(error)}
    return {
        "blockers": _blockers(again.accounts),
        "why": {
            int(row): entry.sentence()
            for entry in again.accounts
            for of, _, row in [entry.request_id.rpartition("-")]
            if of == name and row.isdecimal()
        },
        "misses": [
            MissReason(blame, found.total(), found.most_common(N_CULPRITS))
            for blame, found in ({} if missed is None else missed.by_blame()).items()
            if found
        ],
        "note": _OTHERS if missed is None else "",
    }


def _blockers(accounts: Sequence[Account]) -> list[tuple[str, float]]:
    """The requests that others waited for longest, in words."""
    seconds: defaultdict[str, float] = defaultdict(float)
    words: dict[str, str] = {}
    for entry in accounts:
        words |= {blocker.request_id: str(blocker) for blocker in entry.blockers}
        for cause, waited_s in entry.waits:
            if cause.blocker:
                seconds[cause.blocker] += waited_s
    longest = Counter(seconds).most_common(N_BLOCKERS)
    return [(words.get(name, name), waited_s) for name, waited_s in longest]
