"""The schedule: every request of a run as one row, made before the clock starts.

A pure function of the scenario (and of the local files it names). Each purpose (arrivals, input
lengths, …) of each class draws from its own PCG64 stream, so that changing one leaves the others as
they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import ScenarioError, nearest
from loadgen.records import EDGES, LATER, SCHEDULE, Edges, Phase, Schedule
from loadgen.workload.arrivals import Arrivals, Traffic
from loadgen.workload.classes import TrafficClass
from loadgen.workload.durations import Durations
from loadgen.workload.layout import (
    Index,
    Layout,
    Owner,
    Purpose,
    joined,
    lay_out,
    places,
    row_numbers,
    stream,
)
from loadgen.workload.prompts import entry_index, planned_tokens
from loadgen.workload.scenario import Scenario

MAX_REQUESTS = 20_000_000
"""About 1.8 GB of schedule; more is a mistyped rate."""


class Plan(NamedTuple):
    """What should happen: the requests, and which of them wait for which."""

    schedule: Schedule
    edges: Edges


def make_schedule(scenario: Scenario) -> Schedule:
    """All requests of a run, dtype `records.SCHEDULE` [n]: the schedule of `make_plan`."""
    return make_plan(scenario).schedule


def make_plan(scenario: Scenario) -> Plan:
    """All requests of a run and the edges between them.

    Rows have request_id 0 … n − 1; those without parents are sorted by time, and rows of one source
    (a session, a chain, a user) follow its first one. Equal scenarios give identical bytes on one
    machine type. `input_tokens` counts the shared prefix and, of a session's turns, everything said
    before (with `context: real` that is an estimate); prefix_id is above 0 for rows with a shared
    prefix. `phase` of a row with parents is that of the soonest instant it can be due; its release
    decides. Raises ScenarioError when nothing would arrive in the measured window, or absurdly
    much.
    """
    whole, class_id = joined(_layouts(scenario))  # held by nobody else: 90 MB per million rows
    whole.rows["class_id"] = class_id
    plan = _in_order(whole, scenario.phases.warmup)
    _set_recorded_lengths(plan.schedule, scenario)
    if not np.any(plan.schedule["phase"] == Phase.measure):
        raise ScenarioError(
            f"{scenario.name}: no request arrives in the measured {scenario.phases.measure:g}s "
            f"({scenario.arrivals!r}); lengthen phases.measure or raise arrivals.rate"
        )
    return plan


def _layouts(scenario: Scenario) -> list[Layout]:
    """The rows of each class by themselves."""
    names = scenario.names()
    layouts: list[Layout] = []
    first_prefix = 0
    for asked, arriving, pause, owner in _streams(scenario):
        room = MAX_REQUESTS - sum(len(before.rows) for before in layouts)
        layout = lay_out(asked, arriving, pause, owner, scenario.horizon_s, room)
        if arriving.session_id is not None:
            layout = replace(layout, source=_renumbered(arriving.session_id))
        rows = layout.rows
        if arriving.prefix_id is None:  # classes do not share prefixes
            rows["prefix_id"][rows["prefix_id"] > 0] += np.uint32(first_prefix)
            first_prefix = max(first_prefix, int(rows["prefix_id"].max(initial=0)))
        rows["tenant_id"] = names.tenants.index(asked.tenant)
        rows["priority"] = asked.priority
        layouts.append(layout)
    assert len(layouts) == len(scenario.traffic()), "one layout per class"
    return layouts


def split(schedule: Schedule, n_shards: int) -> list[Schedule]:
    """One part per shard, by session: a session's rows stay together and in order, and the sessions
    are dealt out in turn, so each shard sees the same process thinned, not a stretch of it."""
    assert n_shards >= 1, f"a schedule cannot be split into {n_shards} parts"
    _, rank = np.unique(schedule["session_id"], return_inverse=True)
    return [schedule[rank % n_shards == shard] for shard in range(n_shards)]


def split_plan(plan: Plan, n_shards: int) -> list[Plan]:
    """`split`, and with each part the edges inside it; no edge leaves a session."""
    return [
        Plan(part, plan.edges[np.isin(plan.edges["request_id"], part["request_id"])])
        for part in split(plan.schedule, n_shards)
    ]


def merge(parts: Sequence[Schedule]) -> Schedule:
    """The schedule that `split` took apart, byte for byte."""
    rows = np.concatenate([np.empty(0, SCHEDULE), *parts])
    return rows[np.argsort(rows["request_id"], kind="stable")]


def schedule_sha256(schedule: Schedule, edges: Edges | None = None) -> str:
    """The fingerprint by which two runs are known to have sent the same requests (hex); edges,
    cancels and requests' own promises, where there are any, are part of it (a plan without them has
    the fingerprint that it had before they existed).

    Across machine types compare recorded files: the last bit of a logarithm may differ.
    """
    unused = [name for name in LATER if not schedule[name].any()]
    kept = _without(schedule, unused) if unused else schedule
    digest = hashlib.sha256(np.ascontiguousarray(kept).tobytes())
    if edges is not None:
        digest.update(np.ascontiguousarray(edges).tobytes())
    return digest.hexdigest()


def _without(schedule: Schedule, columns: Sequence[str]) -> NDArray[np.void]:
    names = [name for name in schedule.dtype.names or () if name not in columns]
    rows = np.empty(len(schedule), [(name, schedule.dtype[name]) for name in names])
    for name in names:
        rows[name] = schedule[name]
    return rows


def _streams(
    scenario: Scenario,
) -> Iterator[tuple[TrafficClass, Traffic, Durations | None, Owner]]:
    """Every class with what arrives for it: its share of the scenario's stream, or its own."""
    classes, has_names = scenario.traffic(), bool(scenario.classes)
    sharing = [name for name, asked in classes.items() if asked.arrivals is None]
    shares: dict[str, Traffic] = {}
    if sharing:
        assert scenario.arrivals is not None, "a scenario whose class has no arrivals is refused"
        whole = _arriving(scenario, scenario.arrivals, ())
        shares = _shared_out(whole, sharing, classes, scenario)
    for name, asked in classes.items():
        owner = Owner(scenario.seed, (name,) if has_names else ())
        arrivals = asked.arrivals or scenario.arrivals
        assert arrivals is not None, "a scenario without arrivals is refused on reading"
        arriving = shares[name] if name in shares else _arriving(scenario, arrivals, owner.name)
        yield asked, arriving, arrivals.pause(), owner


def _arriving(scenario: Scenario, arrivals: Arrivals, owner: tuple[str, ...]) -> Traffic:
    horizon_s = scenario.horizon_s
    rate = arrivals.mean_rate_per_s(horizon_s)
    if rate is not None and rate * horizon_s > MAX_REQUESTS:
        raise ScenarioError(
            f"{scenario.name}: {rate:g}/s over {horizon_s:g}s asks for {rate * horizon_s:.3g} "
            f"requests, at most {MAX_REQUESTS:.0e}; lower arrivals.rate or phases.measure"
        )
    return arrivals.traffic(stream(scenario.seed, Purpose.arrivals, *owner), horizon_s)


def _shared_out(
    whole: Traffic, sharing: Sequence[str], classes: dict[str, TrafficClass], scenario: Scenario
) -> dict[str, Traffic]:
    """The stream of the scenario by class: as a trace names them, else by weight, one independent
    draw for each arrival (a Poisson stream thinned so is Poisson in every class)."""
    if len(sharing) == 1 and whole.class_name is None:
        return {sharing[0]: whole}
    if whole.class_name is not None and scenario.classes:
        for name in np.unique(whole.class_name).tolist():
            if name not in sharing:
                hint = nearest(name, sharing)
                raise ScenarioError(f"{scenario.name}: the trace has a class '{name}'; {hint}")
        return {name: _chosen(whole, whole.class_name == name) for name in sharing}
    weights = np.array([classes[name].weight or 1.0 for name in sharing])
    cumulative = np.cumsum(weights / weights.sum())
    drawn = stream(scenario.seed, Purpose.classes).random(len(whole)) * cumulative[-1]
    chosen = np.minimum(np.searchsorted(cumulative, drawn, side="right"), len(sharing) - 1)
    return {name: _chosen(whole, chosen == number) for number, name in enumerate(sharing)}


def _chosen(whole: Traffic, which: NDArray[np.bool_]) -> Traffic:
    columns = {field.name: getattr(whole, field.name) for field in fields(whole)}
    chosen: dict[str, Any] = {
        name: None if column is None else column[which] for name, column in columns.items()
    }
    return Traffic(**chosen)


def _renumbered(session_id: NDArray[np.uint32]) -> Index:
    """Sessions from 0 in order of their first row; 0 is none, a session of its own."""
    ids = session_id.astype(np.int64)
    is_alone = ids == 0
    ids[is_alone] = int(ids.max(initial=0)) + np.arange(1, int(is_alone.sum()) + 1)
    _, number = np.unique(ids, return_inverse=True)
    return _ranked(number.astype(np.int32))


def _ranked(number: Index) -> Index:
    """Numbers 0 … k renumbered in order of their first row, those that do not occur left out.

    Without sorting: `np.unique` of a million rows took 60 MB more (schedule_speed.py).
    """
    if not len(number) or bool(np.all(number[1:] >= number[:-1])):  # in order, gaps at most
        steps = np.diff(number, prepend=number[:1]) != 0
        return np.cumsum(steps, dtype=np.int32)
    first = np.full(int(number.max()) + 1, -1, np.int32)
    first[number[::-1]] = row_numbers(len(number))[::-1]  # the last write is the first row
    used = places(first >= 0)
    rank = np.empty(len(first), np.int32)
    rank[used[np.argsort(first[used])]] = row_numbers(len(used))
    return rank[number]


def _in_order(whole: Layout, warmup_s: float) -> Plan:
    """Numbers the rows: by when their source arrived, and as laid out within it."""
    rows, n = whole.rows, len(whole.rows)
    is_sorted = bool(np.all(whole.starts_s[1:] >= whole.starts_s[:-1]))
    if is_sorted:  # as one stream is: nothing to move, a copy of a million rows would be 70 MB
        order: slice | Index = slice(None)
        number = row_numbers(n)
        schedule = rows
    else:
        order = np.argsort(whole.starts_s, kind="stable").astype(np.int32)
        number = np.empty(n, np.int32)
        number[order] = row_numbers(n)
        schedule = rows[order]
    schedule["request_id"] = row_numbers(n)
    schedule["session_id"] = _ranked(whole.source[order])
    is_warmup = whole.earliest_s[order] < warmup_s
    schedule["phase"] = np.where(is_warmup, np.uint8(Phase.warmup), np.uint8(Phase.measure))
    edges = np.zeros(len(whole.child), EDGES)
    edges["request_id"], edges["after"] = number[whole.child], number[whole.parent]
    return Plan(schedule, edges[np.lexsort((edges["after"], edges["request_id"]))])


def _set_recorded_lengths(schedule: Schedule, scenario: Scenario) -> None:
    """With recorded prompts: the lengths of the one each row sends, a shared prefix left out."""
    kind = scenario.prompts
    recorded = kind.recorded()
    if not recorded:
        return
    tokenizer = kind.load_tokenizer()
    chosen = np.array(
        [entry_index(int(s), len(recorded)) for s in schedule["prompt_seed"]], np.int64
    )
    inputs = np.array([planned_tokens(prompt, kind, tokenizer) for prompt in recorded])
    outputs = np.array([prompt.output_tokens or 0 for prompt in recorded])
    schedule["input_tokens"] = inputs[chosen]
    schedule["prefix_id"], schedule["prefix_tokens"] = 0, 0
    stated = outputs[chosen]
    schedule["output_tokens"] = np.where(stated > 0, stated, schedule["output_tokens"])
