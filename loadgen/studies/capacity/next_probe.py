"""The next probe: its load, its length, and whether the result is precise enough to stop.

The state of a search is its list of probes: `next_probe` computes the next probe from them, so an
interrupted search continues where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist, median
from typing import Literal, NamedTuple

import numpy as np

from loadgen.studies.capacity.by_schedule import Estimate, Refuted, Sample, Speed, capacity
from loadgen.studies.capacity.curve import REACH_LOGIT, Posterior, posterior, throughput
from loadgen.studies.capacity.dispersion import USUAL
from loadgen.studies.capacity.probe import Probe, Sent
from loadgen.studies.capacity.traffic import Law, Traffic

LEAST_NEAR = 5.0
"""Probes near the target before a result is given, each counted by its relevance."""
MOST_PROBES = 80
FIRST_REQUESTS, FIRST_TREES = 200.0, 40.0
"""Requests of a first probe, or trees of agents, where the schedule gives no estimate."""
_FIRST_WITH_LAW = 80.0
_MISSES_TO_SEE = 4.0
_MOST_STEPS = 10  # of a factor two, until both sides of the target are seen
_UP = 4.0  # an overloaded probe is short, and shows the throughput
_OF_THROUGHPUT, _MOST_DOWN, _LEAST_DOWN = 0.75, 8.0, 0.85
_SURELY_ABOVE = 2.0  # standard errors of the throughput; no higher load can be sustained
_GROWTH = 4.0
_LENGTHENS, _LONGEST = 1.6, 16.0  # growth per refining probe, and its limit
_LONG, _LEAST_LONG = 5.0, 2.0  # two probes near the target are as long as five first probes
_LONG_FOR = 6.0  # … and as this many memories of the queue
_AT_CAPACITY = 2.0  # times the precision, where that is more than `REACH_LOGIT`
_UNCONFIRMED = 0.1  # relative error (too high) of a result from short probes alone
_UNEXPLAINED = 0.2  # the same where probes are shorter and their schedule explains nothing
_LEAST_WORTH, _WARM_WORTH = 10.0, 3.0  # independent requests of a probe, of its warm-up
_PARTS = 6.0
_APART_LOGIT, _APART_MOST = 0.5, 0.12
_APART_LEAST = 0.5  # of the precision
_TURNS = (0.0, -1.0, 1.0)

_LEAST_ROWS = 10  # of a probe that counts in the estimate from the schedule
_UNKNOWN_SPEED = 0.5  # standard error of ln(throughput) where no probe shows it
_BESIDE = 0.25  # a probe within so much of the estimate, in ln(load), confirms it
_LEAST_BESIDE = 2
_LEAST_ROWS_BESIDE = 1500  # requests of such probes, before a narrow interval ends a search
_LEAST_MISSES_BESIDE = 30.0  # … expected among them
_SAME, _FAR_LOGIT, _ASIDE = 0.1, 1.1, 0.25
_BEYOND = 1.25  # times the highest load tried, that a probe at the estimate may lie at
_N_REFINING = 4  # probes into which a budget is divided once both sides are seen
_WIDE = 0.4  # half-width from which the narrower of both intervals is taken
_LEAST_BY_SCHEDULE = 0.1  # half-width; the curve through long probes narrows further
_USEFUL, _LEAST_TO_STOP = 0.25, 8  # half-width and probes from which narrowing may stop
_MOST_REPEATS = 2  # of a probe that contradicts the others
_LONGER = 1.25  # than the probe that is repeated, so that it has at least as many requests
_AT = 0.005  # probes whose ln(load) differ by less are at the same load

Outcome = Literal["found", "misses", "at_least", "unsettled", "contradictory"]
Method = Literal["schedule", "curve"]


@dataclass(frozen=True)
class Question:
    """The parameters of a search for the highest level whose attainment is at least `target`.

    `start` is the first level; `low` and `high` bound the search if given. The result is precise
    enough when half its interval is at most `precision` of it. `warmup_s` and `measure_s` are the
    least a probe takes. `is_integer`: levels are whole numbers (users). `is_fixed`: a probe is the
    scenario's own window, neither shorter nor longer (its rate varies by design). `law` is the
    traffic at any load; without it, for the reason `no_law`, the schedule gives no estimate.
    `first` are the requests of a first probe; where trees of agents are counted, its trees.
    `per_level` are the requests (or trees) per second and level before any probe shows them, None
    if they are unknown.
    """

    target: float
    start: float
    precision: float = 0.05
    confidence: float = 0.95
    low: float | None = None
    high: float | None = None
    warmup_s: float = 0.0
    measure_s: float = 5.0
    is_integer: bool = False
    is_fixed: bool = False
    law: Law | None = field(default=None, repr=False)
    no_law: str = ""
    first: float = FIRST_REQUESTS
    per_level: float | None = 1.0

    def __post_init__(self) -> None:
        for share in (self.target, self.precision, self.confidence):
            assert 0 < share < 1, f"not between 0 and 1: {self}"
        assert self.start > 0, f"no positive start: {self}"


@dataclass(frozen=True, slots=True)
class NextProbe:
    """The next probe: its level, warm-up and measured time, and the design effect for its early
    stop, which covers all that its queue may remember."""

    level: float
    warmup_s: float
    measure_s: float
    effect: float = USUAL


@dataclass(frozen=True)
class SearchState:
    """The state of the search. `outcome` found: the interval is narrow enough. misses: even the
    lowest level misses the target. at_least: the highest level meets it. unsettled: none of these
    yet. contradictory: proven probes contradict each other or every estimate.

    `method` is that of the value: the schedule that was sent, or the curve through the attainments
    alone; `why` is the reason for the latter, or for no value. `doubted` is the load to repeat
    where probes contradict each other.
    """

    outcome: Outcome
    posterior: Posterior | None
    value: float | None
    low: float | None
    high: float | None
    method: Method = "curve"
    why: str = ""
    doubted: float | None = None

    @property
    def half_width(self) -> float:
        """Half the width of the interval, relative to its value; infinite without a value."""
        if self.value is None or self.low is None or self.high is None:
            return math.inf
        return (self.high - self.low) / 2 / self.value


def judge(question: Question, probes: Sequence[Probe]) -> SearchState:
    """The state of the search after the usable probes."""
    return _judged(question, tuple(probe for probe in probes if probe.is_usable))


@lru_cache(maxsize=4)  # a step of a search reads the state several times
def _judged(question: Question, usable: tuple[Probe, ...]) -> SearchState:
    fine = [p.level for p in usable if p.attainment >= question.target]
    missed = [p.level for p in usable if p.attainment < question.target]
    if not fine and missed and not _can_go_down(question, missed):
        return SearchState("misses", None, None, None, min(missed))
    if not missed and fine and not _can_go_up(question, fine):
        return SearchState("at_least", None, None, max(fine), None)
    if not fine or not missed:
        return SearchState(
            "unsettled", None, None, max(fine, default=None), min(missed, default=None)
        )
    levels = [probe.level for probe in usable]
    reach = (min(levels) / 2, max(levels) * 2)
    estimate = posterior(usable, question.target, *reach, is_fixed=question.is_fixed)
    by_schedule = _by_schedule(question, usable, estimate)
    by_curve = _by_curve(question, usable, estimate)
    return _consistent(question, usable, _in_order(by_schedule, by_curve))


def _in_order(by_schedule: SearchState, by_curve: SearchState) -> Sequence[SearchState]:
    """Both states, the preferred one first: the schedule's, unless its interval is wider than ± 40
    % and than the curve's, or long probes have narrowed the curve's to what was requested."""
    if _WIDE < by_schedule.half_width < math.inf and by_curve.half_width < by_schedule.half_width:
        why = "the schedule leaves a wider interval"
        return replace(by_schedule, value=None, low=None, high=None, why=why), by_curve
    if by_curve.outcome == "found" and by_schedule.outcome != "found":
        return by_curve, by_schedule
    return by_schedule, by_curve


def _by_schedule(question: Question, usable: Sequence[Probe], estimate: Posterior) -> SearchState:
    """The state by the schedule that was sent; without a value where its fit is refuted."""
    found = estimated(question, usable)
    if isinstance(found, Refuted):
        return SearchState("unsettled", estimate, None, None, None, "schedule", found.why)
    state = SearchState("unsettled", estimate, *found[:3], "schedule")
    is_found = state.half_width <= question.precision and _is_seen(question, usable, found.value)
    return replace(state, outcome="found") if is_found else state


def _is_seen(question: Question, usable: Sequence[Probe], value: float) -> bool:
    """Whether enough was sent beside an estimate for its interval to end a search.

    A search that ends at its first narrow interval picks the intervals that are narrow by luck: of
    those within ± 15 % from fewer than 700 requests, two of five lay above the capacity, of those
    from 1 500 on one of 25.
    """
    beside = [probe for probe in usable if abs(math.log(probe.level / value)) <= _BESIDE]
    least = max(_LEAST_ROWS_BESIDE, _LEAST_MISSES_BESIDE / (1 - question.target))
    return len(beside) >= _LEAST_BESIDE and sum(probe.n_due for probe in beside) >= least


def estimated(question: Question, usable: Sequence[Probe]) -> Estimate | Refuted:
    """The capacity by the schedule of usable probes that lie on both sides of it."""
    if question.law is None:
        return Refuted(question.no_law)
    samples = [
        sample_of(probe.level, probe.sent)
        for probe in usable
        if probe.sent is not None and len(probe.sent.at_us) >= _LEAST_ROWS
    ]
    if not samples:
        return Refuted("no probe holds its schedule")
    most = throughput(usable, question.target)
    highest = max(probe.level for probe in usable)
    speed = (
        Speed(highest, _UNKNOWN_SPEED) if most is None else Speed(math.exp(most.log_rate), most.se)
    )
    fine = max(p.level for p in usable if p.attainment >= question.target)
    missed = min(p.level for p in usable if p.attainment < question.target)
    start = math.sqrt(fine * missed)
    return capacity(samples, question.target, speed, question.law, start, question.confidence)


def sample_of(level: float, sent: Sent) -> Sample:
    """The requests of a probe as the estimate takes them."""
    traffic = Traffic(
        np.array(sent.at_us) / 1e6,
        np.array(sent.input_tokens, np.float64),
        np.array(sent.new_tokens, np.float64),
        np.array(sent.output_tokens, np.float64),
        np.array(sent.class_id, np.int64),
    )
    return Sample(level, traffic, np.array(sent.missed, np.float64))


def _consistent(
    question: Question, usable: Sequence[Probe], states: Sequence[SearchState]
) -> SearchState:
    """The first state with an interval that proven probes leave open; its value is the median given
    them, its upper bound at most a load that is proven to miss."""
    estimate = states[0].posterior
    assert estimate is not None, "both sides of the target are seen"
    passes, fails, doubted = _proven(question, usable)
    why = ""
    for state in states:
        if state.value is None or state.low is None or state.high is None:
            why = state.why
        elif passes >= state.high:
            why = (
                f"the estimate is {state.value:.4g}, and a probe at {passes:.4g} is proven to meet "
                "the SLO"
            )
        elif fails <= state.low:
            why = (
                f"the estimate is {state.value:.4g}, and a probe at {fails:.4g} is proven to miss "
                "the SLO"
            )
        elif passes < fails:
            value = _given(state.low, state.value, state.high, passes, fails, question.confidence)
            value = max(1, math.floor(value)) if question.is_integer else value
            return replace(state, value=value, high=min(state.high, fails), why=why)
    if passes > fails:
        why = (
            f"a probe at {passes:.4g} is proven to meet the SLO, and a probe at {fails:.4g} is "
            "proven to miss it"
        )
    rates = [p for p in (passes, fails, states[-1].value or 0.0) if 0 < p < math.inf]
    return SearchState(
        "contradictory", estimate, None, min(rates), max(rates), why=why, doubted=doubted
    )


class _Proven(NamedTuple):
    """The highest rate that is proven to meet the target, else 0; the lowest that is proven to miss
    it, else infinity; the load of the probe to repeat where they contradict an estimate."""

    passes: float
    fails: float
    doubted: float


def _proven(question: Question, usable: Sequence[Probe]) -> _Proven:
    """The proofs of usable probes.

    A probe proves the rate that it sent where that is less extreme than its load, as in a lull
    between two bursts. Of many probes some are proven by luck: a proof falls when a probe at the
    same load, at least as long, ends otherwise.
    """
    target = question.target
    passes, fails, pass_level, fail_level = 0.0, math.inf, 0.0, math.inf
    for probe in usable:
        sent = probe.level if question.law is None else probe.n_due / probe.measured_s
        repeats = [p for p in _at(probe.level, usable) if p.n_due >= probe.n_due]
        is_pass = probe.low is not None and probe.low >= target
        if is_pass and all(repeat.attainment >= target for repeat in repeats):
            passes, pass_level = max((passes, pass_level), (min(sent, probe.level), probe.level))
        is_miss = probe.high is not None and probe.high < target
        if is_miss and all(repeat.attainment < target for repeat in repeats):
            fails, fail_level = min((fails, fail_level), (max(sent, probe.level), probe.level))
    return _Proven(passes, fails, pass_level if passes > 0 else fail_level)


def _at(level: float, probes: Sequence[Probe]) -> list[Probe]:
    return [probe for probe in probes if abs(math.log(probe.level / level)) <= _AT]


def _given(
    low: float, value: float, high: float, passes: float, fails: float, confidence: float
) -> float:
    """The median of the capacity given that it lies between `passes` and `fails`: unchanged where
    neither lies on the wrong side of it, else of a log-normal with that side of the interval."""
    if passes <= value <= fails:
        return value
    reach = high / value if passes > value else value / max(low, value / 1e3)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    normal = NormalDist(math.log(value), math.log(reach) / z)
    below = normal.cdf(math.log(passes)) if passes > 0 else 0.0
    above = normal.cdf(math.log(fails)) if math.isfinite(fails) else 1.0
    share = min(max((below + above) / 2, 1e-9), 1 - 1e-9)
    return min(max(math.exp(normal.inv_cdf(share)), passes, low), fails, high)


def _by_curve(question: Question, usable: Sequence[Probe], estimate: Posterior) -> SearchState:
    """The state by the attainments alone."""
    fine = [p.level for p in usable if p.attainment >= question.target]
    missed = [p.level for p in usable if p.attainment < question.target]
    tail = (1 - question.confidence) / 2
    value, low, high = (estimate.quantile(share) for share in (0.5, tail, 1 - tail))
    if max(fine) < min(missed):  # possibly a cliff: it may be anywhere between the two
        most = None if question.is_fixed else throughput(usable, question.target)
        above = math.inf if most is None else math.exp(most.log_rate + _SURELY_ABOVE * most.se)
        low, high = min(low, max(fine)), max(high, min(min(missed), above))
    n_long = _n_long(question, usable, estimate, value)
    settled = _state("found", question, estimate, (value, low, high))
    assert settled.low is not None
    assert settled.high is not None
    is_near = float(estimate.relevance.sum()) >= LEAST_NEAR and n_long >= _LEAST_LONG
    is_narrow = settled.half_width <= question.precision or (
        question.is_integer and settled.high - settled.low <= 2
    )
    if is_near and is_narrow:
        return settled
    unconfirmed = _UNCONFIRMED if question.law is None else _UNEXPLAINED
    low *= 1 - unconfirmed / (1 + n_long / _LEAST_LONG)
    return _state("unsettled", question, estimate, (value, low, high))


def _state(
    outcome: Outcome,
    question: Question,
    estimate: Posterior,
    interval: tuple[float, float, float],
) -> SearchState:
    value, low, high = interval
    if question.is_integer:
        value, low, high = max(1, math.floor(value)), max(0, math.floor(low)), math.ceil(high)
    return SearchState(outcome, estimate, value, low, high)


def next_probe(question: Question, probes: Sequence[Probe]) -> NextProbe | None:
    """The next probe, or None when the search is over."""
    usable = [probe for probe in probes if probe.is_usable]
    state = judge(question, probes)
    if state.outcome not in ("unsettled", "contradictory") or len(probes) >= MOST_PROBES:
        return None
    if state.doubted is not None:
        return _repeated(question, usable, state)
    if state.posterior is None:
        return _bracketing(question, usable)
    if not _pays(question, usable, state):
        return None
    is_least = state.method == "schedule" and state.half_width <= _LEAST_BY_SCHEDULE
    if question.law is not None and state.value is not None and not is_least:
        return _at_estimate(question, usable, state)
    return _refining(question, usable, state.posterior)


def _pays(question: Question, usable: Sequence[Probe], state: SearchState) -> bool:
    """Whether further probes narrow the interval: not where it is below a quarter of the value and
    the last two probes narrowed it by less than half of what their share of the time promises."""
    if state.method != "schedule" or state.half_width > _USEFUL or len(usable) < _LEAST_TO_STOP:
        return True
    before = judge(question, usable[:-2])
    all_s, last_s = (math.fsum(probe.spent_s for probe in part) for part in (usable, usable[-2:]))
    return state.half_width <= before.half_width * math.pow(1 - last_s / max(all_s, 1e-9), 0.25)


def _first_requests(question: Question) -> float:
    first = question.first if question.law is None else _FIRST_WITH_LAW
    return max(first, _MISSES_TO_SEE / (1 - question.target))


def _n_long(
    question: Question, usable: Sequence[Probe], estimate: Posterior, value: float
) -> float:
    """The number of long probes at the capacity, each counted by its relevance and its nearness.

    Just above a server's capacity short probes end before the queue builds up, so short probes
    alone look like a cliff at too high a load. Long probes must therefore confirm the result, and
    near the apparent cliff: a far lower load was never in doubt.
    """
    first = max(question.first, _first_requests(question))
    least = max(_LONG * first, _LONG_FOR * estimate.memory(question.target))
    least = 0.0 if question.is_fixed else least
    reach = max(_AT_CAPACITY * question.precision, REACH_LOGIT / estimate.slope)
    if question.is_integer:  # no level lies nearer to a cliff between two whole levels
        whole = max(1.0, math.floor(value))
        reach = max(reach, math.log((whole + 1) / whole))
    return math.fsum(
        relevance * math.exp(-0.5 * (math.log(probe.level / value) / reach) ** 2)
        for probe, relevance in zip(usable, estimate.relevance.tolist(), strict=True)
        if probe.n_due >= least
    )


def _can_go_down(question: Question, missed: Sequence[float]) -> bool:
    lowest = question.low or question.start / 2**_MOST_STEPS
    return min(missed) > max(lowest, 1.0 if question.is_integer else 0.0) * (1 + 1e-9)


def _can_go_up(question: Question, fine: Sequence[float]) -> bool:
    highest = question.high or question.start * 2 ** (2 * _MOST_STEPS)
    return max(fine) < highest * (1 - 1e-9)


def _within(question: Question, level: float) -> float:
    level = min(max(level, question.low or 0.0), question.high or math.inf)
    return float(max(1, round(level))) if question.is_integer else level


def _bracketing(question: Question, usable: Sequence[Probe]) -> NextProbe:
    """Four times the load while every probe is fine; while every probe misses, half the load, or a
    load below the rate that the overloaded server served."""
    level = question.start
    if usable:
        levels = [probe.level for probe in usable]
        is_fine = usable[0].attainment >= question.target
        level = _UP * max(levels) if is_fine else _lower(question, usable)
    level = _within(question, level)
    return _sized(question, usable, level, _first_requests(question), USUAL)


def _lower(question: Question, missed: Sequence[Probe]) -> float:
    """The next load after probes that all missed the target."""
    lowest = min(probe.level for probe in missed)
    most = throughput(missed, question.target)
    below = 0.0 if most is None else _OF_THROUGHPUT * math.exp(most.log_rate)
    is_new = below < _LEAST_DOWN * lowest  # else a load near it was tried
    return max(below, lowest / _MOST_DOWN) if below and is_new else lowest / 2


def _refining(question: Question, usable: Sequence[Probe], estimate: Posterior) -> NextProbe:
    """A probe at the estimate, or below or above it in turn. It is as long as a sixth of what
    the whole interval needs, longer from probe to probe, and worth at least ten independent
    requests."""
    target, slope = question.target, estimate.slope
    effect, memory = estimate.dispersion.effect, estimate.memory(target)
    z = NormalDist().inv_cdf((1 + question.confidence) / 2)
    needed = effect / (target * (1 - target)) * (z / (slope * question.precision)) ** 2
    least = _first_requests(question) * min(_LENGTHENS ** estimate.nearness.sum(), _LONGEST)
    longest = _GROWTH * max(probe.n_due for probe in usable)
    n = max(least, min(max(needed / _PARTS, _LEAST_WORTH * memory), longest))
    # Probes lie at least about the requested precision apart: SLOs met and missed at nearly the
    # same load look like a queue with an endless memory.
    least_apart = _APART_LEAST * question.precision
    apart = max(min(_APART_LOGIT / slope, _APART_MOST), estimate.sd, least_apart)
    turns = _TURNS if apart > least_apart else _TURNS[1:]
    turn = turns[len(usable) % len(turns)]
    level = _within(question, estimate.quantile(0.5) * math.exp(turn * apart))
    return _sized(question, usable, level, n, memory)


def _repeated(question: Question, usable: Sequence[Probe], state: SearchState) -> NextProbe | None:
    """The longest probe at the load in doubt once more, a quarter longer; None after two
    repeats."""
    assert state.posterior is not None
    assert state.doubted is not None
    same = _at(state.doubted, usable)
    if len(same) > _MOST_REPEATS:
        return None
    before = max(same, key=lambda probe: probe.n_due)
    memory = state.posterior.memory(question.target)
    if question.is_fixed:
        return NextProbe(state.doubted, question.warmup_s, question.measure_s, memory)
    measure_s = max(question.measure_s, _LONGER * before.measured_s)
    return NextProbe(state.doubted, before.warmup_s, measure_s, memory)


def _at_estimate(question: Question, usable: Sequence[Probe], state: SearchState) -> NextProbe:
    """A probe at the estimate, or beside it where the probe before, at nearly that load, was far
    from the target: half of the requests that the interval still lacks, at most four times the
    longest probe. Its warm-up counts in the estimate, and is as short as allowed."""
    assert state.posterior is not None
    assert state.value is not None
    levels = [probe.level for probe in usable]
    value, last = state.value, usable[-1]
    if abs(math.log(last.level / value)) <= _SAME:
        odds = (last.n_met + 0.5) / (last.n_due - last.n_met + 0.5)
        away = math.log(odds) - math.log(question.target / (1 - question.target))
        if abs(away) > _FAR_LOGIT:
            value *= math.exp(math.copysign(_ASIDE * min(state.half_width, 0.5), away))
    level = _within(question, min(max(value, min(levels) / 2), _BEYOND * max(levels)))
    n_sent = sum(probe.n_due for probe in usable if abs(math.log(probe.level / level)) <= 0.5)
    lacking = n_sent * ((state.half_width / question.precision) ** 2 - 1)
    longest = _GROWTH * max(probe.n_due for probe in usable)
    n = max(_first_requests(question), min(lacking / 2, longest))
    per_s = _requests_per_s(question, usable, level)
    assert per_s is not None, "a probe precedes"
    effect = state.posterior.memory(question.target)
    return NextProbe(level, question.warmup_s, max(question.measure_s, n / per_s), effect)


def _sized(
    question: Question,
    usable: Sequence[Probe],
    level: float,
    n: float,
    memory: float,
) -> NextProbe:
    if question.is_fixed:
        return NextProbe(level, question.warmup_s, question.measure_s, memory)
    per_s = _requests_per_s(question, usable, level)
    if per_s is None:
        return NextProbe(level, question.warmup_s, question.measure_s, memory)
    measure_s = max(question.measure_s, n / per_s)
    warmup_s = max(question.warmup_s, min(_WARM_WORTH * memory / per_s, measure_s / 2))
    return NextProbe(level, warmup_s, measure_s, memory)


def _requests_per_s(question: Question, usable: Sequence[Probe], level: float) -> float | None:
    """The request rate at a level, as in the nearest probe; before the first probe by `per_level`,
    None if that is unknown."""
    if not usable:
        return None if question.per_level is None else question.per_level * level
    nearest = min(usable, key=lambda probe: abs(math.log(probe.level / level)))
    return nearest.n_due / nearest.measured_s * level / nearest.level


_FAIR_SHARE = 0.25  # of the remaining budget, for a probe before the capacity is bracketed
_FAIR_WITH_LAW = 0.125  # the same where its requests count in the estimate, however few

_LEAST_HURRIED = 0.1  # of the window of 200 requests: some twenty still carry information

_LEAST_PROBE = 0.2  # of the planned window; a shorter probe is not started


def fit_into(
    question: Question, probes: Sequence[Probe], planned: NextProbe, left_s: float
) -> NextProbe | None:
    """The planned probe as far as it fits into `left_s` with the time that a probe takes beyond its
    warm-up and window; None where too little of it does."""
    left_s -= _beyond_s(probes)
    usable = [probe for probe in probes if probe.is_usable]
    bracketed_after = _bracketed_after(usable, question.target)
    if question.law is not None and bracketed_after is not None:
        n_left = max(1, _N_REFINING - (len(usable) - bracketed_after))
        share_s = left_s / n_left - question.warmup_s
        planned = replace(
            planned, measure_s=min(planned.measure_s, max(question.measure_s, share_s))
        )
    length_s = planned.warmup_s + planned.measure_s
    if length_s <= _fair_share(question, bracketed_after) * left_s:
        return planned
    if question.is_fixed:
        return planned if length_s <= left_s else None
    if bracketed_after is None:
        return _hurried(question, planned, left_s)
    if length_s <= left_s:
        return planned
    warmup_s = max(question.warmup_s, planned.warmup_s * left_s / length_s)
    measure_s = left_s - warmup_s
    if measure_s < _LEAST_PROBE * planned.measure_s:
        return None
    return replace(planned, warmup_s=warmup_s, measure_s=measure_s)


def _bracketed_after(usable: Sequence[Probe], target: float) -> int | None:
    """The number of probes after which both sides of the target were seen; None if not yet."""
    is_fine = [probe.attainment >= target for probe in usable]
    if not is_fine or all(is_fine) or not any(is_fine):
        return None
    return is_fine.index(not is_fine[0]) + 1


def _beyond_s(probes: Sequence[Probe]) -> float:
    """The median time of the probes so far beyond warm-up and window: last answers, a drain,
    requests before the first."""
    beyond_s = [probe.spent_s - probe.warmup_s - probe.measured_s for probe in probes]
    return max(0.0, median(beyond_s)) if beyond_s else 0.0


def _fair_share(question: Question, bracketed_after: int | None) -> float:
    return _FAIR_SHARE if question.law is None or bracketed_after is not None else _FAIR_WITH_LAW


def _hurried(question: Question, planned: NextProbe, left_s: float) -> NextProbe | None:
    """The planned probe, shortened. Before both sides of the capacity are known, no probe takes
    much of the time that is left: a rough result is better than half of a precise result."""
    least = _LEAST_HURRIED * max(1.0, question.first / _first_requests(question))
    least_s = max(question.measure_s, least * planned.measure_s)
    share = _fair_share(question, None)
    measure_s = min(planned.measure_s, max(share * left_s - planned.warmup_s, least_s))
    rest_s = math.floor(1e3 * (left_s - measure_s)) / 1e3  # no warm-up of a rounding error
    warmup_s = max(question.warmup_s, min(planned.warmup_s, rest_s))
    if warmup_s + measure_s > left_s:
        return None
    return replace(planned, warmup_s=warmup_s, measure_s=measure_s)
