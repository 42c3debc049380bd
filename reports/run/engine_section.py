"""Section on the bundled engine: its steps over time, why requests waited, which requests delayed
them, and why requests missed the SLO. Filled from the engine's log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loadgen.manifest.sections import HostMemorySection, ReplicaSection, SimulatedEngineSection
from loadgen.measure.wording import format_count, format_value
from reports.charts import (
    BLUE,
    GREEN,
    LEGEND,
    ORANGE,
    Record,
    Spec,
    axis,
    colors,
    figure,
    hues,
    number,
    standalone,
    time_unit,
)
from reports.run.timeline import PANEL_HEIGHT, TIME, name_strip, shown_scale, strip, zoom_params

_CAUSES = {
    "request": "Unachievable: they would miss even alone on an idle engine",
    "capacity": "Overload: more tokens were offered at that time than the engine can compute",
    "policy": "Batching mode: another mode would have met the SLO",
    "interference": "Interference: other requests delayed them",
    "unsettled": "Undecided: only a longer simulation shows whether another mode meets the SLO",
}


@dataclass(frozen=True, slots=True)
class MissReason:
    """Requests that missed the SLO for the same cause: their number, and the modes or requests most
    often named, with their counts."""

    blame: str
    n: int
    culprits: Sequence[tuple[str, int]] = ()

    def sentence(self) -> str:
        cause = f"{_CAUSES[self.blame]} ({format_count(self.n)} missed SLOs)"
        named = ", ".join(f"{name} ({format_count(n)})" for name, n in self.culprits if name)
        return f"{cause}; most often: {named}." if named else f"{cause}."


@dataclass(frozen=True, slots=True)
class EngineSection:
    """`bins`: from_s, to_s, prefill and decode (tokens per s), kv (largest share of blocks in use).
    `waiting`: from_s, to_s, reason, requests (mean). `waits_s`: seconds of all requests by reason.

    The other fields need a log of level "full". `blockers`: descriptions of requests with the
    seconds that other requests waited for them; `why`: a sentence per request id; `misses`: by
    cause. `note`: what is missing, and how to get it.
    """

    bins: Sequence[Record]
    waiting: Sequence[Record]
    waits_s: Mapping[str, float]
    blockers: Sequence[tuple[str, float]] = ()
    why: Mapping[int, str] = field(default_factory=dict)
    misses: Sequence[MissReason] = ()
    note: str = ""
    replicas: ReplicaTable | None = None


@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """The replicas of a simulated cluster as text: a head, a row each, and sentences about
    them."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


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
        note="Simulated run: engine steps are not recorded; --target reference records them."
        + _copied(engine.host)
        + _computed(engine.core),
        replicas=replica_table(engine) if engine.replicas else None,
    )


def _computed(core: str) -> str:
    if not core:  # of a version before
        return ""
    if core == "compiled":
        return " Its steps were computed by the compiled core."
    return f" Its steps were computed in Python ({core.removeprefix('python: ')})."


def _copied(host: HostMemorySection | None) -> str:
    if host is None:
        return ""
    return (
        f" {host.out_bytes / 1e9:.3g} GB of KV were copied to host memory and "
        f"{host.back_bytes / 1e9:.3g} GB back, for which steps took "
        f"{format_value(host.copying_s, 's')} longer in sum."
    )


def replica_table(engine: SimulatedEngineSection) -> ReplicaTable:
    """The replicas of a simulated engine that has several."""
    has_roles, transfers = any(r.role != "both" for r in engine.replicas), engine.transfers
    columns: dict[str, Callable[[ReplicaSection], str]] = {
        "replica": lambda r: r.name,
        **({"role": lambda r: r.role} if has_roles else {}),
        "requests": lambda r: format_count(r.requests),
        "in it, mean": lambda r: f"{r.mean_requests:.3g}",
        "computing": lambda r: format_value(r.busy_share, "share"),
        "preemptions": lambda r: format_count(r.preemptions),
        "cached tokens": lambda r: format_count(r.cached_tokens),
    }
    notes = [f"Router: {engine.router}."] if engine.router else []
    failures, scaling = engine.failures, engine.scaling
    if any(r.bubble_share is not None for r in engine.replicas):
        columns["bubbles"] = lambda r: _optional_share(r.bubble_share)
        notes.append("Bubbles: stages of a pipeline idle while a batch is in it.")
    if failures is not None:
        columns["failures"] = lambda r: format_count(r.failures)
        notes.append(
            f"{format_count(failures.failures)} failures: requests were sent again "
            f"{format_count(failures.retried)} times, {format_count(failures.lost)} failed."
        )
    if scaling is not None:
        columns["switched on"] = lambda r: format_value(r.on_share, "share")
        notes.append(
            f"{scaling.mean_replicas:.3g} replicas were on, on average; "
            f"{format_count(scaling.starts)} were started."
        )
    if transfers is not None:
        columns["KV sent"] = lambda r: f"{r.sent_kv_bytes / 1e9:.3g} GB"
        columns["KV received"] = lambda r: f"{r.received_kv_bytes / 1e9:.3g} GB"
        columns["sending"] = lambda r: format_value(r.link_share, "share")
        notes.append(
            f"Requests moved {format_count(transfers.requests)} times with "
            f"{transfers.kv_bytes / 1e9:.3g} GB of KV, {format_count(transfers.migrated)} times to "
            f"balance loads. A move took {format_value(transfers.mean_wait_s, 's')} of waiting for "
            f"memory and a pause of {format_value(transfers.mean_copy_s, 's')} for copying, on "
            "average."
        )
    rows = [[cell(replica) for cell in columns.values()] for replica in engine.replicas]
    return ReplicaTable(list(columns), rows, notes)


def _optional_share(share: float | None) -> str:
    return "" if share is None else format_value(share, "share")


def engine_figures(story: EngineSection, end_s: float) -> dict[str, Spec]:
    """Figures by name; none for waits without a waiting request, none over time without steps. The
    time axis ends with the run, at `end_s`, and is brushed together with the run's timeline."""
    drawn = {"engine": _timeline(story, end_s)} if story.bins else {}
    if story.waits_s:
        drawn["engine-waits"] = _waits(story.waits_s)
    return drawn


def blocker_rows(story: EngineSection) -> list[tuple[str, str]]:
    return [(name, format_value(seconds, "s")) for name, seconds in story.blockers]


def _timeline(story: EngineSection, end_s: float) -> Spec:
    """Tokens of the steps, waiting requests by reason, and KV in use over a common time axis."""
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
    if any(b["kv"] for b in kv):
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
    digits: str = "",
) -> Spec:
    """Stacked steps, a colour per kind; the last bin of each kind is drawn up to its end."""
    last = {record["of"]: record for record in records}
    rows = [*records, *({**record, "from_s": record["to_s"]} for record in last.values())]
    legend = {**LEGEND, "labelLimit": 260, "columns": 4} if len(kinds) > 1 else None
    ticks = {"minExtent": 46, **({"format": digits} if digits else {})}
    return {
        **strip(title, PANEL_HEIGHT),
        "data": {"values": rows},
        "mark": {"type": "area", "interpolate": "step-after", "opacity": 0.75, "clip": True},
        "encoding": {
            "x": axis("from_s", None, axis={"grid": False, "tickCount": 10}),
            "y": axis("value", unit, stack="zero", axis=ticks),
            "color": hues("of", list(kinds), list(kinds.values()), legend),
            "tooltip": [
                number("from_s", "from s"),
                {"field": "of", "title": "kind"},
                number("value", unit),
            ],
        },
    }


def _waits(waits_s: Mapping[str, float]) -> Spec:
    """Seconds of waiting, all requests together, by reason, the longest first."""
    unit, per_s = time_unit(max(waits_s.values()))
    reasons = {
        "field": "reason",
        "type": "nominal",
        "sort": None,
        "title": None,
        "axis": {"labelLimit": 220},
    }
    return figure(
        "Seconds that requests waited inside the engine, by reason",
        [{"reason": reason, "value": s * per_s} for reason, s in waits_s.items()],
        height=26 * len(waits_s),
        mark={"type": "bar", "height": 16},
        encoding={
            "y": reasons,
            "x": axis("value", f"{unit}, all requests"),
            "color": hues("reason", list(waits_s), colors(len(waits_s)), None),
            "tooltip": [{"field": "reason"}, number("value", unit)],
        },
    )
