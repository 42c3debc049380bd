"""Numbers of a run of agents: the outcomes of its trees, the parts of their time, and the cached
share of their prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.prefix_hits import ideal_hits
from loadgen.measure.statistics.dependence import of_share, of_values
from loadgen.measure.statistics.event_rate import event_rate
from loadgen.measure.statistics.intervals import Interval, Values, mean_bounds
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.measure.statistics.population import Population, of_groups, of_requests
from loadgen.measure.statistics.proportions import wilson
from loadgen.measure.trees import (
    Rows,
    TreeOutcomes,
    Trees,
    ended_trees,
    in_order_of_start,
    tree_times,
)
from loadgen.records import Run, Status

_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_MOST_TURNS = 2**31
_TURNS = ((1, 1), (2, 2), (3, 5), (6, 10), (11, 20), (21, 50), (51, _MOST_TURNS))
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class TreeSpread:
    """A number of each of the n due trees that have ended."""

    n: int
    mean: Interval
    percentiles: dict[str, Percentile]
    max: float


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The prompt tokens of the successful due requests, as planned, and the shares of them that are
    cached: `ideal` in an unlimited cache, `reported` by the server (None: it stated none at all).
    The others are misses: `first_sight`, text that no earlier prompt began with; `compaction`, the
    same of prompts that are shorter than the prompt before them in their chain; `lost`, ideal hits
    that the server did not report (None as `reported`). `working_set_tokens` is the largest number
    of distinct prompt tokens that trees had sent which were live at an instant of the window."""

    requests: int
    prompt_tokens: int
    ideal: Interval
    reported: Interval | None
    first_sight: float
    compaction: float
    lost: float | None
    working_set_tokens: int


@dataclass(frozen=True, slots=True)
class TurnGroup:
    """The successful due requests of some turns of their chains, `3-5`: TTFT, the median of the
    tokens that an unlimited cache lacks, and the shares of the prompt tokens that are cached."""

    turns: str
    requests: int
    ttft_p50_s: Percentile
    ttft_p90_s: Percentile
    new_tokens_p50: float
    ideal: Interval
    reported: Interval | None


@dataclass(frozen=True, slots=True)
class AgentNumbers:
    """The trees of a run. `planned` = due + begun_before (the measured window, or in the start of a
    closed loop) + not_begun; due = met + missed + open (no miss, and not ended when the run did).

    `attainment` is met / (met + missed) with its interval, and lies between `attainment_least`
    and `attainment_most`, however the open trees end. The `…_s` are of the due trees that have
    ended: `task_time_s` = `model_s` + `tools_s` + `subagents_s` along the path that ended last.
    `tasks_per_hour` are trees that ended in the measured window, `goodput_tasks_per_hour` those of
    them that missed nothing.
    """

    planned: int
    due: int
    met: int
    missed: int
    open: int
    begun_before: int
    not_begun: int
    attainment: Interval
    attainment_least: float
    attainment_most: float
    task_time_s: TreeSpread
    model_s: TreeSpread
    tools_s: TreeSpread
    subagents_s: TreeSpread
    wait_share: TreeSpread
    tasks_per_hour: Interval
    goodput_tasks_per_hour: Interval
    cache: CacheUse
    turns: tuple[TurnGroup, ...]


def agent_numbers(
    run: Run,
    columns: PerRequest,
    due: Mask,
    trees: Trees,
    outcomes: TreeOutcomes,
    window: MeasuredWindow,
    confidence: float,
) -> AgentNumbers:
    """The numbers of the trees of a run; `due` are its due rows, `outcomes` those of its trees."""
    ended, times = ended_trees(trees, run), tree_times(trees, run)
    shown = in_order_of_start(trees, run, outcomes.due & ended)
    n_due, n_met, n_open = outcomes.n, outcomes.n_met, outcomes.n_open
    not_begun = np.isnan(trees.begun_s(run)) & ~outcomes.due
    hit_times = of_share(outcomes.hits).hit_times(confidence)
    rates = [_per_hour(trees, run, which, window, confidence) for which in (ended, outcomes.kept)]
    uses = _CacheRows(run, columns, due, trees)
    return AgentNumbers(
        planned=len(trees),
        due=n_due,
        met=n_met,
        missed=outcomes.n_missed,
        open=n_open,
        begun_before=len(trees) - n_due - int(np.count_nonzero(not_begun)),
        not_begun=int(np.count_nonzero(not_begun)),
        attainment=wilson(n_met, len(outcomes.hits), confidence, hit_times),
        attainment_least=n_met / n_due if n_due else math.nan,
        attainment_most=(n_met + n_open) / n_due if n_due else math.nan,
        task_time_s=_spread(times.task_s[shown], confidence),
        model_s=_spread(times.model_s[shown], confidence),
        tools_s=_spread(times.tools_s[shown], confidence),
        subagents_s=_spread(times.subagents_s[shown], confidence),
        wait_share=_spread(times.wait_share[shown], confidence, most=1.0),
        tasks_per_hour=rates[0],
        goodput_tasks_per_hour=rates[1],
        cache=uses.whole(window, confidence),
        turns=tuple(uses.by_turn(confidence)),
    )


def _spread(values: Values, confidence: float, most: float = math.inf) -> TreeSpread:
    """The spread of values in order of the start of their trees, between 0 and `most`."""
    population = of_requests(values)
    mean = _within(population.mean((1 + confidence) / 2), most)
    percentiles = {
        name: population.percentile(quantile, confidence) for name, quantile in _PERCENTILES.items()
    }
    return TreeSpread(population.n, mean, percentiles, population.largest())


def _per_hour(
    trees: Trees, run: Run, which: Mask, window: MeasuredWindow, confidence: float
) -> Interval:
    """The trees that ended in the measured window, per hour."""
    own = trees.tree >= 0
    ends_s, done_s = np.zeros(len(trees)), run.request_rows["done_s"][own]
    np.maximum.at(ends_s, trees.tree[own], np.where(np.isnan(done_s), 0.0, done_s))
    lasted_s = (ends_s - trees.begun_s(run))[which]
    cycle_s = float(lasted_s.mean()) if len(lasted_s) else math.nan
    rate = event_rate(ends_s[which], window.start_s, window.end_s, cycle_s, confidence)
    return rate.times(_HOUR_S)


def _within(found: Interval, most: float) -> Interval:
    """The interval of a number between 0 and `most`."""
    low = None if found.low is None else max(0.0, found.low)
    return Interval(found.value, low, None if found.high is None else min(most, found.high))


class _CacheRows:
    """The successful due requests of agents, with the tokens of their prompts that are cached."""

    def __init__(self, run: Run, columns: PerRequest, due: Mask, trees: Trees) -> None:
        schedule, rows = run.schedule_rows, run.request_rows
        counted = due & columns.is_ok & (trees.tree >= 0)
        self._rows: Rows = np.flatnonzero(counted)
        self._trees, self._run = trees, run
        self._ttft_s, self._turn = columns.ttft_s, trees.turn
        self._planned = schedule["input_tokens"].astype(np.float64)
        self._stated = np.where(rows["input_tokens"] > 0, rows["input_tokens"], self._planned)
        self._cached = np.minimum(rows["cached_tokens"], self._stated)
        self._ideal = _ideal(run)
        self._is_stated = bool(self._cached[self._rows].any())
        self._is_compacted = _is_compacted(schedule["input_tokens"], trees)

    def whole(self, window: MeasuredWindow, confidence: float) -> CacheUse:
        rows, planned = self._rows, self._planned[self._rows]
        new = planned - self._ideal[rows]
        lost = np.maximum(0.0, self._ideal[rows] - self._cached[rows])
        total, is_compacted = float(planned.sum()), self._is_compacted[rows]

        def share(tokens: NDArray[np.float64]) -> float:
            return float(tokens.sum()) / total if total else math.nan

        return CacheUse(
            requests=len(rows),
            prompt_tokens=int(total),
            ideal=self._share(self._ideal, self._planned, rows, confidence),
            reported=self._reported(rows, confidence),
            first_sight=share(new[~is_compacted]),
            compaction=share(new[is_compacted]),
            lost=share(lost) if self._is_stated else None,
            working_set_tokens=self._working_set(window),
        )

    def _working_set(self, window: MeasuredWindow) -> int:
        """The tokens of a tree count from the release of the first request with them until its last
        end; of a tree that goes on, until the end of the run."""
        rows, trees = self._run.request_rows, self._trees
        sent = np.flatnonzero((trees.tree >= 0) & np.isfinite(rows["released_s"]))
        tree, new = trees.tree[sent], self._planned[sent] - self._ideal[sent]
        ends_s = np.zeros(len(trees))
        np.maximum.at(ends_s, tree, np.nan_to_num(rows["done_s"][sent], nan=np.inf))
        is_broken = trees.any_of(np.isfinite(rows["released_s"]) & (rows["status"] != Status.ok))
        ends_s = np.where(ended_trees(trees, self._run) | is_broken, ends_s, np.inf)
        at_s = np.r_[rows["released_s"][sent], ends_s]
        change = np.r_[new, -np.bincount(tree, new, len(trees))]
        order = np.lexsort((change, at_s))  # at the same instant, what ends before what begins
        at_s, held = at_s[order], np.cumsum(change[order])
        first, last = np.searchsorted(at_s, (window.start_s, window.end_s))
        return round(float(held[max(0, first - 1) : last].max(initial=0.0)))

    def by_turn(self, confidence: float) -> list[TurnGroup]:
        """The groups of turns that have any request."""
        found = []
        for first, last in _TURNS:
            turn = self._turn[self._rows]
            rows = self._rows[(turn >= first) & (turn <= last)]
            if not len(rows):
                continue
            ttft = self._by_tree(self._ttft_s, rows)
            found.append(
                TurnGroup(
                    turns=_span(first, last),
                    requests=len(rows),
                    ttft_p50_s=ttft.percentile(0.5, confidence),
                    ttft_p90_s=ttft.percentile(0.9, confidence),
                    new_tokens_p50=float(
                        np.quantile(
                            self._planned[rows] - self._ideal[rows], 0.5, method="inverted_cdf"
                        )
                    ),
                    ideal=self._share(self._ideal, self._planned, rows, confidence),
                    reported=self._reported(rows, confidence),
                )
            )
        return found

    def _by_tree(self, values: Values, rows: Rows) -> Population:
        """The values of some rows, those of a tree as a cluster; without NaN."""
        rows = rows[~np.isnan(values[rows])]
        tree = self._trees.tree[rows]
        if not len(rows):
            return Population(np.empty(0))
        order = np.argsort(tree, kind="stable")
        starts = np.flatnonzero(np.diff(tree[order], prepend=-1))
        released_s = self._run.request_rows["released_s"][rows[order][starts]]
        kept = np.ones(len(starts), bool)
        return of_groups(values[rows[order]], starts, kept, np.argsort(released_s), None)

    def _reported(self, rows: Rows, confidence: float) -> Interval | None:
        if not self._is_stated:
            return None
        return self._share(self._cached, self._stated, rows, confidence)

    def _share(self, part: Values, whole: Values, rows: Rows, confidence: float) -> Interval:
        """Σ part / Σ whole over some rows, with trees as clusters in order of their start."""
        tree, n = self._trees.tree[rows], len(self._trees)
        sums = np.bincount(tree, part[rows], n).astype(np.float64)
        sizes = np.bincount(tree, whole[rows], n).astype(np.float64)
        numbers = in_order_of_start(self._trees, self._run, sizes > 0)
        sums, sizes = sums[numbers], sizes[numbers]
        if not len(sizes):
            return Interval(math.nan)
        level = (1 + confidence) / 2
        times = of_values(sums - sums.sum() / sizes.sum() * sizes).bound_times(level)
        return _within(mean_bounds(sums, sizes, level, times), 1.0)


def _ideal(run: Run) -> NDArray[np.float64]:
    """The tokens of each prompt that a request released before it begins with, too; 0 where nothing
    was released."""
    released_s = run.request_rows["released_s"]
    order = np.argsort(released_s, kind="stable")
    order = order[np.isfinite(released_s[order])]
    hits = np.zeros(len(released_s))
    hits[order] = ideal_hits(run.schedule_rows[order], run.piece_rows)
    return hits


def _is_compacted(input_tokens: NDArray[np.uint32], trees: Trees) -> Mask:
    """The rows whose prompt is shorter than that of the row before them in their chain."""
    order = np.lexsort((trees.turn, trees.chain, trees.tree))
    found = np.zeros(len(order), bool)
    is_shorter = input_tokens[order][1:] < input_tokens[order][:-1]
    found[order[1:]] = is_shorter & (trees.turn[order][1:] > 1)
    return found


def _span(first: int, last: int) -> str:
    if last == _MOST_TURNS:
        return f"{first} and more"
    return f"{first}" if first == last else f"{first}-{last}"
