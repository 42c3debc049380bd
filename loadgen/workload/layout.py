"""The rows of one class of traffic."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import ScenarioError
from loadgen.records import OWN_SLO, SCHEDULE, Schedule, Times
from loadgen.workload.arrivals import Traffic
from loadgen.workload.classes import Step, TrafficClass
from loadgen.workload.dialogue import Context
from loadgen.workload.durations import Durations
from loadgen.workload.lengths import TokenCounts
from loadgen.workload.requests import Cancel, Requests, SharedPrefix


class Purpose(IntEnum):
    """What a random stream is for. The numbers are part of what a seed means: append, never
    renumber."""

    arrivals = 0
    input_tokens = 1
    output_tokens = 2
    prefix = 3
    prompt = 4
    classes = 5
    turns = 6
    think = 7
    cancel = 8


def stream(seed: int, purpose: Purpose, *owner: str) -> np.random.Generator:
    """The generator of one purpose, of a class or of a step of a chain where `owner` names it:
    independent of every other one with the same seed, and of which others there are.

    Source: M. E. O'Neill, PCG (2014); NumPy's SeedSequence spawn keys.
    """
    key = (int(purpose), *(zlib.crc32(name.encode()) for name in owner))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


Index = NDArray[np.int32]  # row numbers, or counts of rows; half the memory of int64
QUICKEST_S = 0.02  # a closed loop is planned for answers as quick as this,
QUICKEST_TOKENS_PER_S = 1000.0  # and so many tokens per second after it
MOST_CONTEXT_TOKENS = 2**31
SOONEST_CANCEL_S = 1e-6  # 0 in the schedule means never


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of one class in order; `source` numbers where each came from, `starts_s` when that
    arrived, `earliest_s` the soonest a row can be due. Edges are pairs of row numbers."""

    rows: Schedule
    source: Index
    starts_s: Times
    earliest_s: Times
    child: Index
    parent: Index


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose random streams these are: a scenario's seed and, with classes, the class's name."""

    seed: int
    name: tuple[str, ...] = ()

    def stream(self, purpose: Purpose, *step: str) -> np.random.Generator:
        return stream(self.seed, purpose, *self.name, *step)


def lay_out(
    asked: TrafficClass,
    traffic: Traffic,
    pause: Durations | None,
    owner: Owner,
    horizon_s: float,
    most_rows: int,
) -> Layout:
    """The rows of a class whose sources arrive as `traffic` says and, with a `pause`, come back
    after it until nothing more can be released before `horizon_s`.

    Filled in: everything but request_id, session_id, class_id, tenant_id, priority and phase.
    Raises ScenarioError when that is more than `most_rows`.
    """
    steps, n_sources = asked.steps(), len(traffic)
    units = _units(asked, traffic.scheduled_s, pause, owner, horizon_s, most_rows)
    unit_source = np.repeat(row_numbers(n_sources), units.per_source)
    sizes = _sizes(asked, len(unit_source), owner)
    n_rows = int(sizes.sum(dtype=np.int64))
    if n_rows > most_rows:
        raise ScenarioError(f"{n_rows:.3g} requests in sessions, at most {most_rows:.0e}")
    first = np.cumsum(sizes, dtype=np.int32) - sizes
    unit = np.repeat(row_numbers(len(sizes)), sizes)
    place = row_numbers(n_rows) - first[unit]
    rows = np.zeros(n_rows, SCHEDULE)
    rows["prompt_seed"] = owner.stream(Purpose.prompt).integers(0, 2**64, n_rows, np.uint64)
    for number, step in enumerate(steps):
        mine = places(place == number) if asked.chain else row_numbers(n_rows)
        _ask(rows, mine, unit[mine], step, traffic, owner, is_step=bool(asked.chain))
    for column in OWN_SLO.values():
        if (promised_s := getattr(traffic, column)) is not None:
            rows[column] = promised_s[unit_source[unit]]
    child, parent = _edges_within(asked, first, place)
    _think(asked, rows, place, owner)
    if asked.session is not None:
        is_turn = place > 0
        rows["context"][is_turn] = Context[asked.session.context]
        _grow_context(rows, first[unit])
    between = _edges_between(asked, unit_source, first, sizes)
    is_again = np.zeros(n_rows, bool)
    is_again[between[0]] = True
    rows["think_s"][is_again] = np.repeat(units.pauses_s, sizes)[is_again]
    rows["after_failure"] = is_again
    child, parent = np.concatenate([child, between[0]]), np.concatenate([parent, between[1]])
    rows["n_parents"] = np.bincount(child, minlength=n_rows)
    source = unit_source[unit]
    starts_s = traffic.scheduled_s[source]
    rows["scheduled_s"] = np.where(rows["n_parents"] == 0, starts_s, np.nan)
    order = np.lexsort((parent, child))
    return Layout(
        rows=rows,
        source=source,
        starts_s=starts_s,
        earliest_s=_earliest_s(rows, source, starts_s),
        child=child[order],
        parent=parent[order],
    )


@dataclass(frozen=True, slots=True)
class _Units:
    per_source: Index  # [n_sources]
    pauses_s: NDArray[np.float64]  # before each unit; of a source's first, unused


def _units(
    asked: TrafficClass,
    starts_s: Times,
    pause: Durations | None,
    owner: Owner,
    horizon_s: float,
    most_rows: int,
) -> _Units:
    """One unit per source, or, in a closed loop, as many as could begin before the horizon if every
    answer came as quickly as `QUICKEST_S` says, and one more: a user who gets to that one was
    answered even faster."""
    n = len(starts_s)
    if pause is None:
        return _Units(np.ones(n, np.int32), np.zeros(n))
    rng, least_s = owner.stream(Purpose.think, "again"), _quickest_s(asked)
    expected = horizon_s / (least_s + pause.mean)
    if n * expected > most_rows:
        raise ScenarioError(
            f"{n} users could send {n * expected:.3g} requests in {horizon_s:g}s, at most "
            f"{most_rows:.0e}; lengthen think, or ask for fewer users or less time"
        )
    counts, pauses = np.zeros(n, np.int32), []
    for source, start_s in enumerate(starts_s.tolist()):
        own: list[NDArray[np.float64]] = []
        last_s = start_s
        while last_s < horizon_s:
            drawn = pause.draw(rng, int(expected) + 8)
            own.append(drawn)
            last_s += float((drawn + least_s).sum())
        drawn = np.concatenate(own)
        begins_s = start_s + np.cumsum(drawn + least_s)
        counts[source] = 2 + int(np.searchsorted(begins_s, horizon_s))
        pauses.append(np.concatenate([[0.0], drawn])[: counts[source]])
    return _Units(counts, np.concatenate([np.empty(0), *pauses]))


def _quickest_s(asked: TrafficClass) -> float:
    """The least time that one unit is planned to take from its first request to its last answer."""
    depth_s: dict[str, float] = {}
    for step in asked.steps():
        tokens = step.requests.mean_lengths[1] or 1.0
        own_s = QUICKEST_S + tokens / QUICKEST_TOKENS_PER_S
        depth_s[step.name] = own_s + max((depth_s[name] for name in step.after), default=0.0)
    longest_s = max(depth_s.values())
    if asked.session is None:
        return longest_s
    turns = asked.session.turns.mean
    return longest_s * turns + asked.session.think.mean * (turns - 1)


def _sizes(asked: TrafficClass, n_units: int, owner: Owner) -> Index:
    """Rows of each unit."""
    if asked.session is not None:
        return asked.session.turns.draw(owner.stream(Purpose.turns), n_units).astype(np.int32)
    return np.full(n_units, len(asked.steps()), np.int32)


def _ask(
    rows: Schedule,
    mine: Index,
    unit: Index,
    step: Step,
    traffic: Traffic,
    owner: Owner,
    is_step: bool,
) -> None:
    """Lengths, prefixes and temperature of the rows `mine`, which belong to `unit`s."""
    asked, name = step.requests, (step.name,) if is_step else ()
    inputs, outputs = lengths(asked, traffic, owner, name, len(mine))
    rows["input_tokens"][mine], rows["output_tokens"][mine] = inputs, outputs
    rows["temperature"][mine] = asked.temperature
    if asked.cancel is not None:
        rng = owner.stream(Purpose.cancel, *name)
        rows["cancel_after_s"][mine] = cancels_s(asked.cancel, rng, len(mine))
    if asked.shared_prefix is None and asked.input_tokens is None and traffic.prefix_id is not None:
        assert traffic.prefix_tokens is not None, "prefixes without their lengths"
        rows["prefix_id"][mine] = traffic.prefix_id
        rows["prefix_tokens"][mine] = traffic.prefix_tokens
    elif asked.shared_prefix is not None:
        _, number = np.unique(unit, return_inverse=True)  # turns of a session share their prefix
        n = int(number.max(initial=-1)) + 1
        chosen = prefix_ids(asked.shared_prefix, owner.stream(Purpose.prefix, *name), n)
        rows["prefix_id"][mine] = chosen[number]
        rows["prefix_tokens"][mine] = asked.shared_prefix.tokens
        rows["input_tokens"][mine] += np.uint32(asked.shared_prefix.tokens)


def cancels_s(cancel: Cancel, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Seconds from its sending after which each of n requests is cancelled; 0 where it is not."""
    is_drawn = rng.random(n) < cancel.share
    return np.where(is_drawn, np.maximum(cancel.after.draw(rng, n), SOONEST_CANCEL_S), 0.0)


def lengths(
    asked: Requests, traffic: Traffic, owner: Owner, name: tuple[str, ...], n: int
) -> tuple[TokenCounts, TokenCounts]:
    """Input tokens (without a shared prefix) and output tokens of n requests: as asked, else as the
    traffic states them; what neither says is 1."""
    input_rng = owner.stream(Purpose.input_tokens, *name)
    output_rng = owner.stream(Purpose.output_tokens, *name)
    inputs, outputs = asked.draw_lengths(input_rng, output_rng, n)
    if traffic.input_tokens is not None and asked.input_tokens is None:
        inputs = traffic.input_tokens
    if traffic.output_tokens is not None and not (asked.output_tokens or asked.has_lengths):
        outputs = traffic.output_tokens
    return inputs, outputs


def prefix_ids(prefix: SharedPrefix, rng: np.random.Generator, n: int) -> NDArray[np.uint32]:
    """Whose prefix each of n requests begins with: 1 … groups, or, for a share 1 − hit_rate of
    them, an id above that nobody else has."""
    if prefix.popularity.kind == "uniform":
        ids = rng.integers(1, prefix.groups, n, endpoint=True)
    else:
        cumulative = np.cumsum(prefix.popularity.shares(prefix.groups))
        drawn = np.searchsorted(cumulative, rng.random(n) * cumulative[-1], side="right")
        ids = np.minimum(drawn, prefix.groups - 1) + 1
    if prefix.hit_rate < 1:
        is_alone = rng.random(n) >= prefix.hit_rate
        ids = np.where(is_alone, prefix.groups + np.cumsum(is_alone), ids)
    return ids.astype(np.uint32)


def _edges_within(asked: TrafficClass, first: Index, place: Index) -> tuple[Index, Index]:
    """(child, parent) row numbers inside units: turns in turn, steps after those they name."""
    if asked.session is not None:
        turns = places(place > 0)
        return turns, turns - 1
    number = {step.name: k for k, step in enumerate(asked.steps())}
    links = [(number[s.name], number[name]) for s in asked.steps() for name in s.after]
    child = np.array([later for later, _ in links], np.int32)
    parent = np.array([before for _, before in links], np.int32)
    return (first[:, None] + child).ravel(), (first[:, None] + parent).ravel()


def _edges_between(
    asked: TrafficClass, unit_source: Index, first: Index, sizes: Index
) -> tuple[Index, Index]:
    """(child, parent) between the units of one source: every first row of a unit waits for every
    last row of the unit before."""
    again = places(unit_source[1:] == unit_source[:-1]) + np.int32(1)
    if asked.session is not None:
        return first[again], first[again] - 1
    steps = asked.steps()
    awaited = {name for step in steps for name in step.after}
    firsts = np.array([k for k, step in enumerate(steps) if not step.after], np.int32)
    lasts = np.array([k for k, step in enumerate(steps) if step.name not in awaited], np.int32)
    child = first[again][:, None, None] + firsts[None, :, None]
    parent = first[again - 1][:, None, None] + lasts[None, None, :]
    child, parent = np.broadcast_arrays(child, parent)
    return child.ravel(), parent.ravel()


def _think(asked: TrafficClass, rows: Schedule, place: Index, owner: Owner) -> None:
    if asked.session is not None:
        pauses = asked.session.think.draw(owner.stream(Purpose.think), len(rows))
        rows["think_s"] = np.where(place > 0, pauses, 0.0)
        return
    for number, step in enumerate(asked.steps()):
        if step.after:
            mine = place == number
            rng = owner.stream(Purpose.think, step.name)
            rows["think_s"][mine] = step.think.draw(rng, int(mine.sum()))


def _grow_context(rows: Schedule, first_of_unit: Index) -> None:
    """Each turn's input holds what was said before: input_k = prefix + Σ_{j ≤ k} new_j +
    Σ_{j < k} output_j. Raises ScenarioError for a conversation that no counter holds."""
    prefix = rows["prefix_tokens"].astype(np.int64)
    new = rows["input_tokens"].astype(np.int64) - prefix
    said = np.cumsum(new + rows["output_tokens"])  # up to and with this row's answer
    before = said - new - rows["output_tokens"]
    total = prefix + before - before[first_of_unit] + new
    if len(total) and int(total.max()) >= MOST_CONTEXT_TOKENS:
        raise ScenarioError(f"a session grows to {int(total.max()):.3g} tokens; ask fewer turns")
    rows["input_tokens"] = total


def _earliest_s(rows: Schedule, source: Index, starts_s: Times) -> Times:
    """When a row is due at the soonest, if all rows of a source came one after the other (steps
    beside each other come sooner; only the phase follows)."""
    if not rows["n_parents"].any():
        return starts_s
    ends_s = QUICKEST_S + rows["output_tokens"] / QUICKEST_TOKENS_PER_S
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
    """Several classes' rows in one layout, and which of them each row came from."""
    if len(layouts) == 1:  # copying the only one cost 80 MB per million rows (schedule_speed.py)
        return layouts[0], np.zeros(len(layouts[0].rows), np.int32)
    sizes = [len(layout.rows) for layout in layouts]
    n_sources = [int(layout.source.max(initial=-1)) + 1 for layout in layouts]
    before = np.cumsum([0, *sizes])
    sources_before = np.cumsum([0, *n_sources])

    def shifted(arrays: Sequence[Index], by: NDArray[np.int64]) -> Index:
        moved = [a + np.int32(offset) for a, offset in zip(arrays, by.tolist(), strict=False)]
        return np.concatenate([np.empty(0, np.int32), *moved])

    whole = Layout(
        rows=np.concatenate([np.empty(0, SCHEDULE), *(layout.rows for layout in layouts)]),
        source=shifted([layout.source for layout in layouts], sources_before),
        starts_s=np.concatenate([np.empty(0), *(layout.starts_s for layout in layouts)]),
        earliest_s=np.concatenate([np.empty(0), *(layout.earliest_s for layout in layouts)]),
        child=shifted([layout.child for layout in layouts], before),
        parent=shifted([layout.parent for layout in layouts], before),
    )
    return whole, np.repeat(row_numbers(len(layouts)), sizes)


def row_numbers(n: int) -> Index:
    """0 … n − 1."""
    return np.arange(n, dtype=np.int32)


def places(which: NDArray[np.bool_]) -> Index:
    """The row numbers at which a mask is true."""
    return np.flatnonzero(which).astype(np.int32)
