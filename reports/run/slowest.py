"""The slowest answers of a run: where their seconds went, and when their chunks arrived."""

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
from reports.charts import Record, Spec, axis, figure, layer, number, time_unit
from reports.run.causes import PARTS, part_colors
from reports.run.tables import TableCell

N_SLOWEST = 50
MAX_TICKS = 120  # chunks drawn per answer, evenly taken
HEAD = (
    *("request", "class", "released at", "prompt", "output"),
    *("TTFT", "TTFAT", "TPOT", "longest gap", "E2E"),
)
_ROW_PX = 13
_ENDS: tuple[Literal["left"], Literal["right"]] = ("left", "right")


@dataclass(frozen=True, slots=True)
class Slowest:
    """`bars`: request, part, from_s, to_s; `ticks`: request, at_s; seconds since the scheduled send
    time of each request. `order`: request ids, slowest first; `rows`: table cells under HEAD."""

    order: Sequence[str]
    bars: Sequence[Record]
    ticks: Sequence[Record]
    rows: Sequence[Sequence[TableCell]]


def slowest(run: Run, columns: PerRequest, waited: Mapping[int, str] | None = None) -> Slowest:
    """The successful due requests with the longest E2E; ties in the order of their ids. `waited`
    has the reason for waiting in the server by request id; if not empty, rows have a cell more."""
    ok = np.flatnonzero(due_rows(run) & columns.is_ok & columns.has_token)
    worst = ok[np.argsort(-columns.e2e_s[ok], kind="stable")][:N_SLOWEST].tolist()
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


def gantt(slowest: Slowest) -> Spec:
    """A bar per answer, with a tick for each of its chunks."""
    unit, per_s = time_unit(max(bar["to_s"] for bar in slowest.bars))
    bars = [
        {
            "request": bar["request"],
            "part": bar["part"],
            "from": round(bar["from_s"] * per_s, 3),
            "to": round(bar["to_s"] * per_s, 3),
        }
        for bar in slowest.bars
    ]
    ticks = [{"request": t["request"], "at": round(t["at_s"] * per_s, 3)} for t in slowest.ticks]
    y = {
        "field": "request",
        "type": "nominal",
        "sort": list(slowest.order),
        "title": "request",
        "axis": {"labelFontSize": 9, "minExtent": 40},
    }
    x = axis("from", f"{unit} since the scheduled send time")
    spans = {
        "y": y,
        "x": x,
        "x2": {"field": "to"},
        "color": part_colors({bar["part"] for bar in bars}, columns=1),
        "tooltip": [
            {"field": "request"},
            {"field": "part"},
            number("from", f"from {unit}"),
            number("to", f"to {unit}"),
        ],
    }
    tick = {"type": "tick", "color": "black", "opacity": 0.45, "size": _ROW_PX - 4}
    layers = [
        layer({"type": "bar", "height": _ROW_PX - 4}, spans, bars),
        layer(tick, {"y": y, "x": {**x, "field": "at"}}, ticks),
    ]
    title = "The slowest answers from their scheduled send time, chunk by chunk"
    return figure(title, height=_ROW_PX * len(slowest.order), layer=layers)


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
        TableCell(format_value(float(columns.ttfat_s[row]), "s")),
        TableCell(format_value(float(columns.tpot_s[row]), "s")),
        TableCell(format_value(float(columns.max_stall_s[row]), "s")),
        TableCell(format_value(float(columns.e2e_s[row]), "s")),
    ]
