"""Which classes of traffic slow which others down, as far as one mixed run can tell."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import due_rows
from loadgen.measure.per_request import PerRequest
from loadgen.records import Run

LEAST_REQUESTS = 30
_RANKED = 20_000  # requests of a class that are ranked, evenly taken


def interference(run: Run, columns: PerRequest) -> Mapping[tuple[str, str], float | None]:
    """(class, other class) → how TTFT from send of the one goes with the other's requests in flight
    when it was sent: Spearman's rank correlation over its due answers that ended well.

    None with fewer than `LEAST_REQUESTS` of them, or where either never changes. It says what goes
    together; both may follow a third. Empty for a run of one class.
    """
    names, class_id = run.names.classes, run.schedule_rows["class_id"]
    if len(names) < 2:
        return {}
    rows, well = run.request_rows, due_rows(run) & columns.is_ok & columns.has_token
    found: dict[tuple[str, str], float | None] = {}
    in_flight = [_in_flight(rows["sent_s"][class_id == k], rows["done_s"][class_id == k])
                 for k in range(len(names))]  # fmt: skip
    for victim, name in enumerate(names):
        mine = np.flatnonzero(well & (class_id == victim))
        if len(mine) > _RANKED:
            mine = mine[np.linspace(0, len(mine) - 1, _RANKED).astype(np.intp)]
        sent_s, ttft_s = rows["sent_s"][mine], columns.ttft_from_send_s[mine]
        for number, other in enumerate(names):
            begun_s, ended_s = in_flight[number]
            company = np.searchsorted(begun_s, sent_s) - np.searchsorted(ended_s, sent_s)
            found[name, other] = _rank_correlation(company.astype(np.float64), ttft_s)
    return found


def _in_flight(
    sent_s: NDArray[np.float64], done_s: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sorted instants at which requests came and went; before t there are as many in flight as
    came minus those that went."""
    was_sent = np.isfinite(sent_s)
    return np.sort(sent_s[was_sent]), np.sort(done_s[was_sent & np.isfinite(done_s)])


def _rank_correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """Pearson's correlation of mid-ranks."""
    if len(x) < LEAST_REQUESTS or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(_midranks(x), _midranks(y))[0, 1])


def _midranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Equal values share the mean of the ranks they take."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middles: NDArray[np.float64] = ends - (counts - 1) / 2
    return middles[which]
