"""The validity checks of a run that another tool measured: what its file does not record is "not
known", never passed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from loadgen.manifest.sections import ImportedSection
from loadgen.measure.load import LoadByQuarter
from loadgen.measure.per_request import Mask
from loadgen.measure.slo import Slo
from loadgen.measure.summary import ERROR_GATE, ValidityCheck, gate, timing
from loadgen.measure.validity.error_bound import GAP_METRICS
from loadgen.measure.validity.traffic_checks import cache, grown_load, other_chunks
from loadgen.records import Run

_TIMINGS = (
    *("lateness", "event loop", "read backlog", "client CPU", "run delay", "shared cores"),
    "throttling",
)
_OTHERS = ("steal", "processor speed", "stalls")
_TRAFFIC = ("output lengths", "input lengths", "connections", "encoding")


def imported_checks(
    run: Run, origin: ImportedSection, due: Mask, load: LoadByQuarter | None
) -> list[ValidityCheck]:
    """The checks of `checks.checks`, in its order. Only a damaged record, a growing queue and
    cached prompts can be seen in the file of another tool."""
    unknown = f"not known: {origin.tool} does not record it"
    if damage := other_chunks(run):
        record = gate("record", False, damage)
    else:
        record = gate("record", None, f"not known: the file has what {origin.tool} kept")
    return [
        record,
        gate("stimulus", None, unknown),
        gate("offered load", None, unknown),
        *(timing(name, None, unknown) for name in _TIMINGS),
        *(ValidityCheck(name, None, unknown) for name in _OTHERS),
        _load(origin, load),
        cache(run, due),
        *(ValidityCheck(name, None, unknown) for name in _TRAFFIC),
    ]


def needs_gaps(run: Run, slos: Sequence[Slo]) -> str:
    """Why an SLO cannot be judged: it is on the gaps inside an answer, and the file of another tool
    has none. "" where all can be."""
    origin, rows = run.manifest.imported, run.request_rows
    if origin is None or len(run.chunk_rows) or not np.isfinite(rows["last_token_s"]).any():
        return ""
    texts = [slo.text for slo in slos if slo.metric in GAP_METRICS]
    return f"{texts[0]}: {origin.tool} does not record gaps between tokens" if texts else ""


def _load(origin: ImportedSection, load: LoadByQuarter | None) -> ValidityCheck:
    check = grown_load(load)
    if origin.has_send_times or check.ok is False:
        return check
    return replace(check, ok=None, detail=f"not known: {origin.tool} does not record send times")


def unknown_error(origin: ImportedSection) -> ValidityCheck:
    """The gate of the load generator's own error, of a tool that does not measure its own."""
    return gate(ERROR_GATE, None, f"not known: {origin.tool} does not record its own delays")
