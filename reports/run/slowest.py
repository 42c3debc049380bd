"""The slowest answers of a run, one line each: where their seconds went, and when tokens came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import due_rows
from loadgen.measure.per_request import PerRequest
from loadgen.measure.wording import format_count, format_value
from loadgen.records import Run
from reports.charts import Spec, standalone, time_unit
from reports.run.causes_charts import PARTS
from reports.run.frames import Record
from reports.run.tables import TableCell

N_SLOWEST = 50
MAX_TICKS = 120  # chunks drawn per answer, evenly taken
HEAD = ("request", "class", "released at", "prompt", "output", "TTFT", "TPOT", "longest gap", "E2E")
_ROW_PX = 13
_ENDS: tuple[Literal["left"], Literal["right"]] = ("left", "right")


@dataclass(frozen=True, slots=True)
class Slowest:
    """`bars`: request, part, from_s, to_s; `ticks`: request, at_s; since the planned instant of
    each. `order` are the request ids, slowest first; `rows` the same as cells under HEAD."""

    order: Sequence[str]
    bars: Sequence[Record]
    ticks: Sequence[Record]
    rows: Sequence[Sequence[TableCell]]


def slowest(run: Run, columns: PerRequest, waited: Mapping[int, str] | None = None) -> Slowest:
    """Of the due answers that ended well, by E2E; ties in the order of their ids. `waited` says for
    request ids why they waited in the server: where there is any, rows have one more cell."""
    well = np.flatnonzero(due_rows(run) & columns.is_ok & columns.has_token)
    worst = well[np.argsort(-columns.e2e_s[well], kind="stable")][:N_SLOWEST].tolist()
    ids = run.request_rows["request_id"]
    chunk_ids = np.ascontiguousarray(run.chunk_rows["request_id"])
    return Slowest(
        order=[str(ids[row]) for row in worst],
        bars=[bar for row in worst for bar in _bars(run, columns, row)],
        ticks=[tick for row in worst for tick in _ticks(run, chunk_ids, row)],
        rows=[
            [
                *_cells(run, columns, row),
                *([TableCell(waited.get(int(ids[row]), "–"))] if waited else []),
            ]
            for row in worst
        ],
    )


def gantt(seen: Slowest) -> Spec:
    """One bar per answer, a tick for each chunk of it."""
    unit, per_s = time_unit(max(bar["to_s"] for bar in seen.bars))
    bars = [
        {
            "request": bar["request"],
            "part": bar["part"],
            "from": round(bar["from_s"] * per_s, 3),
            "to": round(bar["to_s"] * per_s, 3),
        }
        for bar in seen.bars
    ]
    ticks = [{"request": t["request"], "at": round(t["at_s"] * per_s, 3)} for t in seen.ticks]
    used = [part for part in PARTS.values() if any(bar["part"] == part[0] for bar in bars)]
    y = {
        "field": "request",
        "type": "nominal",
        "sort": list(seen.order),
        "title": "request",
        "axis": {"labelFontSize": 9, "minExtent": 40},
    }
    x = {"type": "quantitative", "title": f"{unit} since the planned instant"}
    number = {"type": "quantitative", "format": ".4~g"}
    layers: list[Spec] = [
        {
            "data": {"values": bars},
            "mark": {"type": "bar", "height": _ROW_PX - 4},
            "encoding": {
                "y": y,
                "x": {**x, "field": "from"},
                "x2": {"field": "to"},
                "color": {
                    "field": "part",
                    "type": "nominal",
                    "scale": {"domain": [t for t, _ in used], "range": [c for _, c in used]},
                    "legend": {"title": None, "orient": "top", "labelLimit": 200},
                },
                "tooltip": [
                    {"field": "request"},
                    {"field": "part"},
                    {"field": "from", "title": f"from {unit}", **number},
                    {"field": "to", "title": f"to {unit}", **number},
                ],
            },
        },
        {
            "data": {"values": ticks},
            "mark": {"type": "tick", "color": "black", "opacity": 0.45, "size": _ROW_PX - 4},
            "encoding": {"y": y, "x": {**x, "field": "at"}},
        },
    ]
    height = _ROW_PX * len(seen.order)
    spec = {"height": height, "width": "container", "layer": layers}
    return standalone(spec, "The slowest answers from their planned instant, token by token")


def _bars(run: Run, columns: PerRequest, row: int) -> list[Record]:
    request = run.request_rows[row]
    released_s = float(request["released_s"])
    connect_s = float(np.nan_to_num(columns.connect_s[row]))
    queued_s = float(request["server_queue_s"])
    sent_s = float(request["sent_s"]) - released_s
    ends = {
        "client_queue_s": sent_s,
        "connect_s": sent_s + connect_s,
        "server_queue_s": sent_s + connect_s + (queued_s if np.isfinite(queued_s) else 0.0),
        "prefill_s": float(request["first_token_s"]) - released_s,
        "decode_s": float(request["last_token_s"]) - released_s,
    }
    bars, from_s, name = [], 0.0, str(request["request_id"])
    for part, to_s in ends.items():
        if to_s > from_s:
            bars.append({"request": name, "part": PARTS[part][0], "from_s": from_s, "to_s": to_s})
        from_s = max(from_s, to_s)
    return bars


def _ticks(run: Run, chunk_ids: NDArray[np.uint32], row: int) -> list[Record]:
    request, chunks = run.request_rows[row], run.chunk_rows
    first, end = (
        int(np.searchsorted(chunk_ids, request["request_id"], side=side)) for side in _ENDS
    )
    received_s = chunks["received_s"][first:end] - request["released_s"]
    if len(received_s) > MAX_TICKS:
        received_s = received_s[np.linspace(0, len(received_s) - 1, MAX_TICKS).astype(np.intp)]
    return [{"request": str(request["request_id"]), "at_s": float(at)} for at in received_s]


def _cells(run: Run, columns: PerRequest, row: int) -> list[TableCell]:
    request, plan = run.request_rows[row], run.schedule_rows[row]
    prompt = int(request["input_tokens"]) or int(plan["input_tokens"])
    return [
        TableCell(str(request["request_id"])),
        TableCell(run.names.classes[int(plan["class_id"])]),
        TableCell(format_value(float(request["released_s"]), "s")),
        TableCell(format_count(prompt)),
        TableCell(format_count(int(columns.output_tokens[row]))),
        TableCell(format_value(float(columns.ttft_s[row]), "s")),
        TableCell(format_value(float(columns.tpot_s[row]), "s")),
        TableCell(format_value(float(columns.max_stall_s[row]), "s")),
        TableCell(format_value(float(columns.e2e_s[row]), "s")),
    ]
