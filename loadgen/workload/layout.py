"""The rows of a traffic class: single requests, sessions or chains, source by source.

A *source* arrives at an instant and sends a *unit* (a single request, a session or a chain) or, in
a closed loop, a sequence of units. The rows of a source are neighbours, parents stand before their
children, and no edge leaves a source.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import ScenarioError
from loadgen.records import OWN_SLO, SCHEDULE, Pieces, Schedule, Times
from loadgen.workload.arrivals import Traffic
from loadgen.workload.classes import Step, TrafficClass
from loadgen.workload.durations import Durations

Index = NDArray[np.int32]  # row numbers, or counts of rows; half the memory of int64
QUICKEST_S = 0.02  # the fastest answer that a plan allows for: this long,
QUICKEST_TOKENS_PER_S = 1000.0  # then so many tokens per second
MOST_SPEED = 10.0
"""Closed loops are planned for answers that are so many times as fast, where that takes no more
than PLENTY_ROWS."""
PLENTY_ROWS = 100_000
MAX_CONTEXT_TOKENS = 2**31


class Purpose(IntEnum):
    """The quantity that a random stream draws. The numbers determine the schedule of every seed:
    append, never renumber."""

    arrivals = 0
    input_tokens = 1
    output_tokens = 2
    prefix = 3
    prompt = 4
    classes = 5
    turns = 6
    think = 7
    cancel = 8
    agents = 9


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The random generators of a scenario or, with the class name as `owner`, of a single class."""

    seed: int
    owner: tuple[str, ...] = ()

    def stream(self, purpose: Purpose, *step: str) -> np.random.Generator:
        """The generator of a purpose, or of a purpose in a single step of a chain. It is
        independent of all other streams, and the same whichever others exist.

        Source: M. E. O'Neill, PCG (2014); NumPy's SeedSequence spawn keys.
        """
        key = (int(purpose), *(zlib.crc32(name.encode()) for name in (*self.owner, *step)))
        return np.random.Generator(
            np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=key))
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of a class in order, with columns of the same length.

    `source` numbers the source of each row, `starts_s` is the arrival of that source, `earliest_s`
    the earliest instant at which the row can be due. `child` and `parent` are the row numbers of
    each edge, `delay_s` its delay. `pieces` are those that the rows' prefixes name, if any.
    """

    rows: Schedule
    source: Index
    starts_s: Times
    earliest_s: Times
    child: Index
    parent: Index
    delay_s: NDArray[np.float32]
    pieces: Pieces | None = None


@dataclass(frozen=True, slots=True)
class ClassTraffic:
    """A class, the arrivals of its sources, the pause between their units in a closed loop (None:
    an open loop), and its random streams."""

    own: TrafficClass
    arrivals: Traffic
    pause: Durations | None
    streams: RandomStreams


def lay_out(
    part: ClassTraffic,
    horizon_s: float,
    max_rows: int,
    warmup_s: float = 0.0,
    n_measured: int | None = None,
) -> Layout:
    """The rows of a class. In a closed loop every source sends further units until no request can
    be released before `horizon_s`, or until it alone has sent `n_measured` after `warmup_s`.

    Fills every column except request_id, session_id, class_id, tenant_id, priority and phase.
    Raises ScenarioError for more than `max_rows` rows.
    """
    speed = _planned_speed(part, horizon_s)
    n_units, pauses_s = _units(part, speed, horizon_s, max_rows, warmup_s, n_measured)
    return laid_out(part, n_units, pauses_s, max_rows, speed)


def laid_out(
    part: ClassTraffic,
    n_units: Index,
    pauses_s: NDArray[np.float64],
    max_rows: int,
    speed: float = 1.0,
) -> Layout:
    """`lay_out` with `n_units[source]` units of each source; `pauses_s` [units] are the pauses
    before each unit (that before a source's first unit is unused)."""
    own, streams, starts_s = part.own, part.streams, part.arrivals.scheduled_s
    unit_source = np.repeat(row_numbers(len(starts_s)), n_units)
    sizes = _sizes(own, len(unit_source), streams)
    n_rows = int(sizes.sum(dtype=np.int64))
    if n_rows > max_rows:
        raise ScenarioError(f"{n_rows:.3g} requests in sessions, at most {max_rows:.0e}")
    first = np.cumsum(sizes, dtype=np.int32) - sizes
    unit = np.repeat(row_numbers(len(sizes)), sizes)
    place = row_numbers(n_rows) - first[unit]
    rows = np.zeros(n_rows, SCHEDULE)
    rows["prompt_seed"] = streams.stream(Purpose.prompt).integers(0, 2**64, n_rows, np.uint64)
    for number, step in enumerate(own.steps()):
        step_rows = places(place == number) if own.chain else row_numbers(n_rows)
        _fill(rows, step_rows, unit[step_rows], step, part)
    for column in OWN_SLO.values():
        if (limits_s := getattr(part.arrivals, column)) is not None:
            rows[column] = limits_s[unit_source[unit]]
    child, parent = _edges_within(own, first, place)
    _think(own, rows, place, streams)
    if own.session is not None:
        rows["context"][place > 0] = own.session.quotes
        _grow_context(rows, first[unit])
    next_child, next_parent = _edges_between(own, unit_source, first)
    is_next = np.zeros(n_rows, bool)
    is_next[next_child] = True
    rows["think_s"][is_next] = np.repeat(pauses_s, sizes)[is_next]
    rows["after_failure"] = is_next
    child, parent = np.concatenate([child, next_child]), np.concatenate([parent, next_parent])
    rows["n_parents"] = np.bincount(child, minlength=n_rows)
    source = unit_source[unit]
    starts_s = starts_s[source]
    rows["scheduled_s"] = np.where(rows["n_parents"] == 0, starts_s, np.nan)
    order = np.lexsort((parent, child))
    return Layout(
        rows=rows,
        source=source,
        starts_s=starts_s,
        earliest_s=_earliest_s(rows, source, starts_s, speed),
        child=child[order],
        parent=parent[order],
        delay_s=np.zeros(len(order), np.float32),
        pieces=part.arrivals.pieces,
    )


def _units(
    part: ClassTraffic,
    speed: float,
    horizon_s: float,
    max_rows: int,
    warmup_s: float,
    n_measured: int | None,
) -> tuple[Index, NDArray[np.float64]]:
    """(units per source, pause before each unit; that before a source's first unit is unused).

    An open loop has a unit per source. A closed loop has as many units as could begin before the
    horizon with the fastest planned answers, and an extra unit: a user who gets to that unit had
    even faster answers. It has no more units after `warmup_s` than `n_measured` and the extra unit.
    """
    n, pause = len(part.arrivals), part.pause
    if pause is None:
        return np.ones(n, np.int32), np.zeros(n)
    rng, (answers_s, thinking_s) = part.streams.stream(Purpose.think, "again"), _unit_s(part.own)
    fastest_s = answers_s / speed + thinking_s
    expected = horizon_s / (fastest_s + pause.mean)
    most = np.inf if n_measured is None else n_measured
    expected = min(expected, warmup_s / (fastest_s + pause.mean) + most)
    if n * expected > max_rows:
        raise ScenarioError(
            f"{n} users could send {n * expected:.3g} requests in {horizon_s:g}s, at most "
            f"{max_rows:.0e}; lengthen think, or use fewer users or less time"
        )
    n_units, all_pauses = np.zeros(n, np.int32), [np.empty(0)]
    for source, start_s in enumerate(part.arrivals.scheduled_s.tolist()):
        blocks: list[NDArray[np.float64]] = []
        last_s, n_after = start_s, 0
        while last_s < horizon_s and n_after <= most:
            blocks.append(pause.draw(rng, int(expected) + 8))
            last_s += float((blocks[-1] + fastest_s).sum())
            pauses_s = np.concatenate(blocks)
            begins_s = start_s + np.cumsum(pauses_s + fastest_s)
            n_warmup, n_before = np.searchsorted(begins_s, (warmup_s, horizon_s)).tolist()
            n_after = len(begins_s) - n_warmup
        n_units[source] = 2 + int(min(n_before, n_warmup + most))
        all_pauses.append(np.concatenate([[0.0], pauses_s])[: n_units[source]])
    return n_units, np.concatenate(all_pauses)


def _planned_speed(part: ClassTraffic, horizon_s: float) -> float:
    """How many times as fast as the quickest answers those are that the rows of a class are planned
    for: 1 in an open loop; in a closed loop as fast as PLENTY_ROWS allow, 1 to MOST_SPEED."""
    if part.pause is None:
        return 1.0
    (answers_s, thinking_s), session = _unit_s(part.own), part.own.session
    n_rows = len(part.own.steps()) if session is None else session.turns.mean
    plenty_s = len(part.arrivals) * n_rows * horizon_s / PLENTY_ROWS - thinking_s - part.pause.mean
    return min(MOST_SPEED, max(1.0, answers_s / max(plenty_s, answers_s / MOST_SPEED)))


def _unit_s(own: TrafficClass) -> tuple[float, float]:
    """The shortest planned time of a unit, from its first request to its last answer: the time of
    its answers, and its thinking time."""
    ends_s: dict[str, float] = {}
    for step in own.steps():
        tokens = step.requests.mean_lengths[1] or 1.0
        step_s = QUICKEST_S + tokens / QUICKEST_TOKENS_PER_S
        ends_s[step.name] = step_s + max((ends_s[name] for name in step.after), default=0.0)
    longest_s = max(ends_s.values())
    if own.session is None:
        return longest_s, 0.0
    turns = own.session.turns.mean
    return longest_s * turns, own.session.think.mean * (turns - 1)


def _sizes(own: TrafficClass, n_units: int, streams: RandomStreams) -> Index:
    """Rows per unit."""
    if own.session is not None:
        return own.session.turns.draw(streams.stream(Purpose.turns), n_units).astype(np.int32)
    return np.full(n_units, len(own.steps()), np.int32)


def _fill(rows: Schedule, step_rows: Index, unit: Index, step: Step, part: ClassTraffic) -> None:
    """Fill lengths, prefixes, temperature and cancellation of `step_rows`, whose units are `unit`.

    The requests' own lengths go before those of the traffic.
    """
    requests, streams, traffic, n = step.requests, part.streams, part.arrivals, len(step_rows)
    name = (step.name,) if part.own.chain else ()
    inputs, outputs = requests.draw_lengths(
        streams.stream(Purpose.input_tokens, *name), streams.stream(Purpose.output_tokens, *name), n
    )
    if traffic.input_tokens is not None and requests.input_tokens is None:
        inputs = traffic.input_tokens
    if traffic.output_tokens is not None and not (requests.output_tokens or requests.has_lengths):
        outputs = traffic.output_tokens
    rows["input_tokens"][step_rows], rows["output_tokens"][step_rows] = inputs, outputs
    rows["temperature"][step_rows] = requests.temperature
    if requests.cancel is not None:
        rng = streams.stream(Purpose.cancel, *name)
        rows["cancel_after_s"][step_rows] = requests.cancel.draw_s(rng, n)
    prefix = requests.shared_prefix
    if prefix is not None:
        _, number = np.unique(unit, return_inverse=True)  # turns of a session share their prefix
        n_prefixes = int(number.max(initial=-1)) + 1
        ids = prefix.draw_ids(streams.stream(Purpose.prefix, *name), n_prefixes)
        rows["prefix_id"][step_rows] = ids[number]
        rows["prefix_tokens"][step_rows] = prefix.tokens
        rows["input_tokens"][step_rows] += np.uint32(prefix.tokens)
    elif requests.input_tokens is None and traffic.prefix_id is not None:
        assert traffic.prefix_tokens is not None, "prefixes without their lengths"
        rows["prefix_id"][step_rows] = traffic.prefix_id
        rows["prefix_tokens"][step_rows] = traffic.prefix_tokens


def _edges_within(own: TrafficClass, first: Index, place: Index) -> tuple[Index, Index]:
    """(child, parent) row numbers within units: each turn after the turn before, steps by
    `after`."""
    if own.session is not None:
        turns = places(place > 0)
        return turns, turns - 1
    number = {step.name: k for k, step in enumerate(own.steps())}
    links = [(number[s.name], number[name]) for s in own.steps() for name in s.after]
    child = np.array([later for later, _ in links], np.int32)
    parent = np.array([earlier for _, earlier in links], np.int32)
    return (first[:, None] + child).ravel(), (first[:, None] + parent).ravel()


def _edges_between(own: TrafficClass, unit_source: Index, first: Index) -> tuple[Index, Index]:
    """(child, parent) row numbers between consecutive units of a source: every first row of a unit
    waits for every last row of the unit before."""
    later = places(unit_source[1:] == unit_source[:-1]) + np.int32(1)
    if own.session is not None:
        return first[later], first[later] - 1
    steps = own.steps()
    parents = {name for step in steps for name in step.after}
    firsts = np.array([k for k, step in enumerate(steps) if not step.after], np.int32)
    lasts = np.array([k for k, step in enumerate(steps) if step.name not in parents], np.int32)
    child = first[later][:, None, None] + firsts[None, :, None]
    parent = first[later - 1][:, None, None] + lasts[None, None, :]
    child, parent = np.broadcast_arrays(child, parent)
    return child.ravel(), parent.ravel()


def _think(own: TrafficClass, rows: Schedule, place: Index, streams: RandomStreams) -> None:
    """Fill the pauses before turns and steps."""
    if own.session is not None:
        pauses = own.session.think.draw(streams.stream(Purpose.think), len(rows))
        rows["think_s"] = np.where(place > 0, pauses, 0.0)
        return
    for number, step in enumerate(own.steps()):
        if step.after:
            is_step = place == number
            rng = streams.stream(Purpose.think, step.name)
            rows["think_s"][is_step] = step.think.draw(rng, int(is_step.sum()))


def _grow_context(rows: Schedule, first_of_unit: Index) -> None:
    """Add the conversation so far to each turn's input: input_k = prefix + Σ_{j ≤ k} new_j +
    Σ_{j < k} output_j. Raises ScenarioError for an input of 2³¹ tokens or more."""
    prefix = rows["prefix_tokens"].astype(np.int64)
    new = rows["input_tokens"].astype(np.int64) - prefix
    until = np.cumsum(new + rows["output_tokens"])  # including this row's answer
    before = until - new - rows["output_tokens"]
    total = prefix + before - before[first_of_unit] + new
    if len(total) and int(total.max()) >= MAX_CONTEXT_TOKENS:
        raise ScenarioError(f"a session grows to {int(total.max()):.3g} tokens; plan fewer turns")
    rows["input_tokens"] = total


def _earliest_s(rows: Schedule, source: Index, starts_s: Times, speed: float) -> Times:
    """The earliest due instant of each row, as if the rows of a source came in sequence.

    (Parallel steps can be due earlier; only the phase depends on this.)
    """
    if not rows["n_parents"].any():
        return starts_s
    ends_s = (QUICKEST_S + rows["output_tokens"] / QUICKEST_TOKENS_PER_S) / speed
    begins_s = -ends_s
    ends_s += rows["think_s"]
    np.cumsum(ends_s, out=ends_s)
    begins_s += ends_s
    starts = places(np.r_[True, source[1:] != source[:-1]][: len(source)])
    begins_s -= np.repeat(begins_s[starts], np.diff(np.r_[starts, len(source)]))
    begins_s[rows["n_parents"] == 0] = 0.0
    begins_s += starts_s
    return begins_s


def joined(layouts: Sequence[Layout]) -> tuple[Layout, Index]:
    """The rows of several classes in a single layout, and the number of each row's class."""
    if len(layouts) == 1:  # copying a single layout cost 80 MB per million rows (schedule_speed.py)
        return layouts[0], np.zeros(len(layouts[0].rows), np.int32)
    sizes = [len(layout.rows) for layout in layouts]
    n_sources = [int(layout.source.max(initial=-1)) + 1 for layout in layouts]

    def shifted(column: str, counts: Sequence[int]) -> Index:
        offsets = np.cumsum([0, *counts[:-1]]).astype(np.int32)
        return np.concatenate(
            [getattr(x, column) + k for x, k in zip(layouts, offsets, strict=True)]
        )

    whole = Layout(
        rows=np.concatenate([layout.rows for layout in layouts]),
        source=shifted("source", n_sources),
        starts_s=np.concatenate([layout.starts_s for layout in layouts]),
        earliest_s=np.concatenate([layout.earliest_s for layout in layouts]),
        child=shifted("child", sizes),
        parent=shifted("parent", sizes),
        delay_s=np.concatenate([layout.delay_s for layout in layouts]),
    )
    return whole, np.repeat(row_numbers(len(layouts)), sizes)


def row_numbers(n: int) -> Index:
    """0 … n − 1."""
    return np.arange(n, dtype=np.int32)


def places(mask: NDArray[np.bool_]) -> Index:
    """The row numbers at which a mask is true."""
    return np.flatnonzero(mask).astype(np.int32)
