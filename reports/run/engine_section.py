"""What the bundled engine says of itself, as a page tells it: steps over time, why requests waited,
who held them up, and whose fault missed promises are. Filled by whoever can read the engine's log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loadgen.manifest.manifest import SimulatedEngineSection
from loadgen.measure.wording import format_count, format_value
from reports.charts import BLUE, GREEN, ORANGE, Spec, standalone, time_unit
from reports.run.frames import Record
from reports.run.timeline import TIME, name_strip, shown_scale, zoom_params
from reports.series import colors

_HEIGHT = 110
_BLAMES = {
    "request": "The promise could not be kept: alone on an idle engine they would have missed it",
    "capacity": "More tokens were offered around then than the engine can do",
    "policy": "Another batching mode would have kept it",
    "interference": "Other requests held them up",
    "unsettled": "It would take more simulation than a page waits for to tell whether another mode"
    " keeps it",
}


@dataclass(frozen=True, slots=True)
class MissReason:
    """Promises that the engine missed for one reason: how many, and the modes or requests most
    often named, with their counts."""

    blame: str
    n: int
    culprits: Sequence[tuple[str, int]] = ()

    def sentence(self) -> str:
        told = f"{_BLAMES[self.blame]}: {format_count(self.n)} missed promises"
        named = ", ".join(f"{name} ({format_count(n)})" for name, n in self.culprits if name)
        return f"{told}; most often named: {named}." if named else f"{told}."


@dataclass(frozen=True, slots=True)
class EngineSection:
    """`bins`: from_s, to_s, prefill and decode (tokens per s), kv (share of blocks, the most).
    `waiting`: from_s, to_s, reason, requests (mean). `waits_s`: seconds of all requests by reason.

    The rest needs a log of level "full": `blockers` are requests in words with the seconds that
    others were charged for waiting for them, `why` a sentence for each request id, `misses` by
    blame. `note` says what is missing and how to get it.
    """

    bins: Sequence[Record]
    waiting: Sequence[Record]
    waits_s: Mapping[str, float]
    blockers: Sequence[tuple[str, float]] = ()
    why: Mapping[int, str] = field(default_factory=dict)
    misses: Sequence[MissReason] = ()
    note: str = ""


def simulated_section(engine: SimulatedEngineSection | None) -> EngineSection | None:
    """The section of a simulated run: why the requests of the measured window waited. None for
    another run."""
    if engine is None:
        return None
    waits_s: dict[str, float] = {}
    for reasons in engine.waits_s.values():
        for name, seconds in reasons.items():
            reason = name.replace("_", " ")
            waits_s[reason] = waits_s.get(reason, 0.0) + seconds
    ordered = sorted(waits_s, key=lambda reason: -waits_s[reason])
    return EngineSection(
        bins=[],
        waiting=[],
        waits_s={reason: waits_s[reason] for reason in ordered if waits_s[reason] > 0},
        note="Simulated: its steps are not kept; --target reference keeps them.",
    )


def engine_figures(story: EngineSection, end_s: float) -> dict[str, Spec]:
    """Figures by name; waits have none where nobody waited, and time none without steps. The time
    axis ends where the run's does, at `end_s`, and is brushed together with it."""
    drawn = {"engine": _timeline(story, end_s)} if story.bins else {}
    if story.waits_s:
        drawn["engine-waits"] = _waits(story.waits_s)
    return drawn


def blocker_rows(story: EngineSection) -> list[tuple[str, str]]:
    return [(name, format_value(seconds, "s")) for name, seconds in story.blockers]


def _timeline(story: EngineSection, end_s: float) -> Spec:
    """Tokens of the steps, who waited for what, and KV in use, over one time axis."""
    tokens = [
        {"from_s": b["from_s"], "to_s": b["to_s"], "of": of, "value": b[of]}
        for b in story.bins
        for of in ("prefill", "decode")
    ]
    kinds = {"prefill": BLUE, "decode": GREEN}
    panels = [_stacked("tokens per s computed", "tokens/s", tokens, kinds)]
    if story.waiting:
        reasons = dict(zip(story.waits_s, colors(len(story.waits_s)), strict=True))
        waiting = [{**w, "of": w["reason"], "value": w["requests"]} for w in story.waiting]
        panels.append(_stacked("requests waiting, by reason", "requests", waiting, reasons))
    kv = [{**b, "of": "KV in use", "value": b["kv"]} for b in story.bins if b["kv"] is not None]
    if kv:
        panels.append(_stacked("KV blocks in use", "share", kv, {"KV in use": ORANGE}, "%"))
    for panel in panels:
        panel["encoding"]["x"]["scale"] = shown_scale(end_s)
    panels[-1]["encoding"]["x"]["title"] = TIME
    return standalone(
        {
            "params": zoom_params([name_strip(panel, k) for k, panel in enumerate(panels)]),
            "spacing": 14,
            "vconcat": panels,
            "resolve": {"scale": {"color": "independent"}},
        },
        "The engine's steps over time: tokens, waiting requests, KV",
    )


def _stacked(
    title: str,
    unit: str,
    records: Sequence[Record],
    kinds: Mapping[str, str],
    number: str = "",
) -> Spec:
    """Steps stacked upon each other, one colour per kind; the last bin of each is closed."""
    last = {record["of"]: record for record in records}
    rows = [*records, *({**record, "from_s": record["to_s"]} for record in last.values())]
    return {
        "height": _HEIGHT,
        "width": "fit",
        "title": {"text": title, "anchor": "start", "fontSize": 12, "offset": 4},
        "data": {"values": rows},
        "mark": {"type": "area", "interpolate": "step-after", "opacity": 0.75, "clip": True},
        "encoding": {
            "x": {
                "field": "from_s",
                "type": "quantitative",
                "title": None,
                "axis": {"grid": False, "tickCount": 10},
            },
            "y": {
                "field": "value",
                "type": "quantitative",
                "stack": "zero",
                "title": unit,
                "axis": {"minExtent": 46, **({"format": number} if number else {})},
            },
            "color": {
                "field": "of",
                "type": "nominal",
                "scale": {"domain": list(kinds), "range": list(kinds.values())},
                "legend": {"title": None, "orient": "top", "labelLimit": 260, "columns": 4}
                if len(kinds) > 1
                else None,
            },
            "tooltip": [
                {"field": "from_s", "title": "from s", "type": "quantitative", "format": ".4~g"},
                {"field": "of", "title": "what"},
                {"field": "value", "title": unit, "type": "quantitative", "format": ".4~g"},
            ],
        },
    }


def _waits(waits_s: Mapping[str, float]) -> Spec:
    """Seconds of waiting of all requests together, by reason, the longest first."""
    unit, per_s = time_unit(max(waits_s.values()))
    rows = [{"reason": reason, "value": s * per_s} for reason, s in waits_s.items()]
    spec = {
        "height": 26 * len(waits_s),
        "width": "container",
        "data": {"values": rows},
        "mark": {"type": "bar", "height": 16},
        "encoding": {
            "y": {
                "field": "reason",
                "type": "nominal",
                "sort": None,
                "title": None,
                "axis": {"labelLimit": 220},
            },
            "x": {"field": "value", "type": "quantitative", "title": f"{unit}, all requests"},
            "color": {
                "field": "reason",
                "type": "nominal",
                "scale": {"domain": list(waits_s), "range": colors(len(waits_s))},
                "legend": None,
            },
            "tooltip": [
                {"field": "reason"},
                {"field": "value", "title": unit, "type": "quantitative", "format": ".4~g"},
            ],
        },
    }
    return standalone(spec, "Seconds that requests waited inside the engine, by reason")
