"""The schedule: every request of a run as a row, computed before the clock starts.

A schedule is a pure function of the scenario and of the local files that it names. Each purpose
(arrivals, input lengths, …) of each class draws from a random stream of its own, so a change to any
purpose leaves the others unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import ScenarioError, nearest
from loadgen.records import (
    EDGES,
    FIRST_PIECE,
    NO_PIECES,
    SCHEDULE,
    Edges,
    Phase,
    Pieces,
    Schedule,
)
from loadgen.workload.arrivals import Arrivals, Traffic, selected
from loadgen.workload.classes import TrafficClass
from loadgen.workload.counted_window import first_requests
from loadgen.workload.dataset_forms import RecordedPrompt
from loadgen.workload.layout import (
    ClassTraffic,
    Index,
    Layout,
    Purpose,
    RandomStreams,
    joined,
    lay_out,
    places,
    row_numbers,
)
from loadgen.workload.more_units import ClosedClass, MoreUnits, set_recorded_lengths
from loadgen.workload.pieces import joined as joined_pieces
from loadgen.workload.prompts import in_sending_order, planned_tokens
from loadgen.workload.scenario import Scenario

MAX_REQUESTS = 20_000_000
"""About 1.8 GB of schedule; a larger number is most likely a mistyped rate."""


class Plan(NamedTuple):
    """The planned requests, the edges between requests that wait for each other, and the pieces
    that their prompts share."""

    schedule: Schedule
    edges: Edges
    pieces: Pieces = NO_PIECES


def make_schedule(scenario: Scenario) -> Schedule:
    """All requests of a run, dtype `records.SCHEDULE` [n]: the schedule of `make_plan`."""
    return make_plan(scenario).schedule


def make_plan(scenario: Scenario) -> Plan:
    """All requests of a run, the edges between them and the pieces of their prompts.

    Rows have request_id 0 … n − 1. Rows without parents are sorted by time; the other rows of a
    source (session, chain, user) follow its first. Equal scenarios give identical bytes on the same
    machine type. `input_tokens` includes the shared prefix and, for turns of a session, the
    conversation so far (an estimate with `context: real`). prefix_id is 0 for rows without a shared
    prefix. `phase` of a row with parents is that of its earliest possible instant; the actual
    release decides. Raises ScenarioError if no request falls into the measured window, or if there
    are more than 20 million.
    """
    layouts, pieces = _layouts(scenario)
    whole, class_id = joined(layouts)
    del layouts  # no other reference: 90 MB per million rows
    whole.rows["class_id"] = class_id
    plan = _in_order(whole, scenario.phases.warmup, pieces)
    _set_recorded_lengths(plan.schedule, scenario)
    if not np.any(plan.schedule["phase"] == Phase.measure):
        if n_rows := len(plan.schedule):
            raise ScenarioError(
                f"{scenario.name}: phases.warmup: all {n_rows} requests arrive in the warm-up of "
                f"{scenario.phases.warmup:g}s (a burst sends them all at 0 s), so none would be "
                "measured; remove phases.warmup"
            )
        raise ScenarioError(
            f"{scenario.name}: no request arrives in the measured {scenario.phases.measure:g}s "
            f"({scenario.arrivals!r}); lengthen phases.measure or raise arrivals.rate"
        )
    return plan


def _layouts(scenario: Scenario) -> tuple[list[Layout], Pieces]:
    """The rows of each class, and the pieces of all."""
    names, phases = scenario.names(), scenario.phases
    layouts: list[Layout] = []
    n_prefixes, n_pieces = 0, 0
    tables = dict[int, tuple[int, Pieces]]()  # pieces of traces, and how many stand before them
    parts = list(_parts(scenario))
    if phases.requests is not None and scenario.requests_in_flow is None:
        parts = first_requests(parts, phases.warmup, phases.requests)
    for part in parts:
        max_rows = MAX_REQUESTS - sum(len(layout.rows) for layout in layouts)
        if part.own.agents is None:
            layout = lay_out(part, scenario.horizon_s, max_rows, phases.warmup, phases.requests)
        else:
            from loadgen.workload.agents.plays import lay_out_plays

            layout = lay_out_plays(part, scenario.horizon_s, max_rows)
        if part.arrivals.session_id is not None:
            layout = replace(layout, source=_renumbered(part.arrivals.session_id))
        rows = layout.rows
        if (pieces := layout.pieces) is not None:  # classes of a trace share its pieces
            n_before, _ = tables.setdefault(id(pieces), (n_pieces, pieces))
            n_pieces = max(n_pieces, n_before + len(pieces))
            rows["prefix_id"][rows["prefix_id"] >= FIRST_PIECE] += np.uint32(n_before)
        is_plain = (rows["prefix_id"] > 0) & (rows["prefix_id"] < FIRST_PIECE)
        rows["prefix_id"][is_plain] += np.uint32(n_prefixes)  # classes do not share prefixes
        n_prefixes = max(n_prefixes, int(rows["prefix_id"][is_plain].max(initial=0)))
        rows["tenant_id"] = names.tenants.index(part.own.tenant)
        rows["priority"] = part.own.priority
        layouts.append(layout)
    assert len(layouts) == len(scenario.traffic()), "a layout per class"
    return layouts, joined_pieces([pieces for _, pieces in tables.values()])


def split(schedule: Schedule, n_shards: int) -> list[Schedule]:
    """A part per shard. The rows of a session stay together and in order; sessions are assigned
    to shards in turn, so each shard gets a thinned copy of the process, not a section of it."""
    assert n_shards >= 1, f"a schedule cannot be split into {n_shards} parts"
    _, rank = np.unique(schedule["session_id"], return_inverse=True)
    return [schedule[rank % n_shards == shard] for shard in range(n_shards)]


def split_plan(plan: Plan, n_shards: int) -> list[Plan]:
    """`split`, with the edges of each part, which no edge leaves, and all pieces."""
    return [
        Plan(part, plan.edges[np.isin(plan.edges["request_id"], part["request_id"])], plan.pieces)
        for part in split(plan.schedule, n_shards)
    ]


def merge(parts: Sequence[Schedule]) -> Schedule:
    """The inverse of `split`, byte for byte."""
    rows = np.concatenate([np.empty(0, SCHEDULE), *parts])
    return rows[np.argsort(rows["request_id"], kind="stable")]


def _parts(scenario: Scenario) -> Iterator[ClassTraffic]:
    """Every class with its arriving requests: a share of the scenario's arrivals, or its own."""
    classes = scenario.traffic()
    sharing = [name for name, own in classes.items() if own.arrivals is None]
    shares: dict[str, Traffic] = {}
    if sharing:
        assert scenario.arrivals is not None, "validation rejects a class without arrivals"
        whole = _traffic(scenario, scenario.arrivals, RandomStreams(scenario.seed))
        shares = _shares(whole, sharing, classes, scenario)
    for name, own in classes.items():
        streams = RandomStreams(scenario.seed, (name,) if scenario.classes else ())
        arrivals = own.arrivals or scenario.arrivals
        assert arrivals is not None, "validation rejects a scenario without arrivals"
        traffic = shares[name] if name in shares else _traffic(scenario, arrivals, streams)
        yield ClassTraffic(own, traffic, arrivals.pause(), streams)


def _traffic(scenario: Scenario, arrivals: Arrivals, streams: RandomStreams) -> Traffic:
    horizon_s = scenario.horizon_s
    rate = arrivals.mean_rate_per_s(horizon_s)
    if rate is not None and rate * horizon_s > MAX_REQUESTS:
        raise ScenarioError(
            f"{scenario.name}: {rate:g}/s over {horizon_s:g}s are {rate * horizon_s:.3g} requests, "
            f"at most {MAX_REQUESTS:.0e}; lower arrivals.rate or phases.measure"
        )
    return arrivals.traffic(streams.stream(Purpose.arrivals), horizon_s)


def _shares(
    whole: Traffic, sharing: Sequence[str], classes: dict[str, TrafficClass], scenario: Scenario
) -> dict[str, Traffic]:
    """The scenario's arrivals by class: by the class names of a trace, else by weight with an
    independent draw for each arrival (so a Poisson stream is Poisson in every class)."""
    if len(sharing) == 1 and whole.class_name is None:
        return {sharing[0]: whole}
    if whole.class_name is not None and scenario.classes:
        for name in np.unique(whole.class_name).tolist():
            if name not in sharing:
                hint = nearest(name, sharing)
                raise ScenarioError(f"{scenario.name}: the trace has a class '{name}'; {hint}")
        return {name: selected(whole, whole.class_name == name) for name in sharing}
    weights = np.array([classes[name].weight or 1.0 for name in sharing])
    cumulative = np.cumsum(weights / weights.sum())
    rng = RandomStreams(scenario.seed).stream(Purpose.classes)
    drawn = rng.random(len(whole)) * cumulative[-1]
    number = np.minimum(np.searchsorted(cumulative, drawn, side="right"), len(sharing) - 1)
    return {name: selected(whole, number == k) for k, name in enumerate(sharing)}


def _renumbered(session_id: NDArray[np.uint32]) -> Index:
    """Session numbers from 0 in order of their first row. Each row with id 0 (no session) becomes a
    session of its own."""
    ids = session_id.astype(np.int64)
    is_alone = ids == 0
    ids[is_alone] = int(ids.max(initial=0)) + np.arange(1, int(is_alone.sum()) + 1)
    _, number = np.unique(ids, return_inverse=True)
    return _ranked(number.astype(np.int32))


def _ranked(number: Index) -> Index:
    """Numbers 0 … k, renumbered without gaps in order of their first row.

    Works without sorting: `np.unique` of a million rows took 60 MB more (schedule_speed.py).
    """
    if not len(number) or bool(np.all(number[1:] >= number[:-1])):  # in order, perhaps with gaps
        steps = np.diff(number, prepend=number[:1]) != 0
        return np.cumsum(steps, dtype=np.int32)
    first = np.full(int(number.max()) + 1, -1, np.int32)
    # in reverse, because the last write wins: it is that of the first row
    first[number[::-1]] = row_numbers(len(number))[::-1]
    used = places(first >= 0)
    rank = np.empty(len(first), np.int32)
    rank[used[np.argsort(first[used])]] = row_numbers(len(used))
    return rank[number]


def _in_order(whole: Layout, warmup_s: float, pieces: Pieces) -> Plan:
    """The plan with rows ordered by the arrival of their source, in layout order within it."""
    rows, n = whole.rows, len(whole.rows)
    is_sorted = bool(np.all(whole.starts_s[1:] >= whole.starts_s[:-1]))
    if is_sorted:  # as a single stream is; a copy of a million rows would take 70 MB
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
    edges["delay_s"] = whole.delay_s
    return Plan(schedule, edges[np.lexsort((edges["after"], edges["request_id"]))], pieces)


def more_units(scenario: Scenario, plan: Plan) -> MoreUnits | None:
    """The further rows of the users of a closed loop beyond `plan`; None for other scenarios, and
    for agents, whose texts are pieces of the plan."""
    schedule, closed = plan.schedule, dict[int, ClosedClass]()
    for class_id, (name, own) in enumerate(scenario.traffic().items()):
        arrivals = own.arrivals or scenario.arrivals
        assert arrivals is not None, "validation rejects a scenario without arrivals"
        if (pause := arrivals.pause()) is None or own.agents is not None:
            continue
        streams = RandomStreams(scenario.seed, (name,) if scenario.classes else ())
        before = schedule["prefix_id"][schedule["class_id"] < class_id]
        before = before[before < FIRST_PIECE]
        closed[class_id] = ClosedClass(
            ClassTraffic(own, Traffic(np.zeros(0)), pause, streams),
            class_id,
            scenario.names().tenants.index(own.tenant),
            int(before.max(initial=0)),
        )
    if not closed:
        return None
    n_users = int(schedule["session_id"].max(initial=0)) + 1
    return MoreUnits(closed, len(schedule), n_users, _recorded_lengths(scenario))


def _set_recorded_lengths(schedule: Schedule, scenario: Scenario) -> None:
    recorded = _recorded_lengths(scenario)
    if recorded is not None:
        set_recorded_lengths(schedule, recorded)


def _recorded_lengths(scenario: Scenario) -> NDArray[np.int64] | None:
    """Input and output tokens (0: not stated) of recorded prompts in sending order, shape [2, n];
    None without."""
    kind = scenario.prompts
    recorded = in_sending_order(kind.recorded(), scenario.seed)
    if not recorded:
        return None
    _require_answer_lengths(scenario, recorded)
    tokenizer = kind.load_tokenizer()
    inputs = [planned_tokens(prompt, kind, tokenizer) for prompt in recorded]
    return np.array([inputs, [prompt.output_tokens or 0 for prompt in recorded]])


def _require_answer_lengths(scenario: Scenario, recorded: Sequence[RecordedPrompt]) -> None:
    """Raises ScenarioError if neither a prompt nor the scenario states the length of its answer."""
    silent = [prompt for prompt in recorded if prompt.output_tokens is None]
    for own in scenario.traffic().values():
        arrivals = own.arrivals or scenario.arrivals
        is_stated = own.requests is not None and own.requests.output_tokens is not None
        if silent and not is_stated and not (arrivals is not None and arrivals.gives_lengths):
            raise ScenarioError(
                f"{silent[0].place}: states no length of its answer, like {len(silent)} of "
                f"{len(recorded)} prompts; set requests.output_tokens (--output-len)"
            )
