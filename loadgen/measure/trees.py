"""The trees of a run's agents: their requests, how they ended, and what their time consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import MeasuredWindow, slos_by_class
from loadgen.measure.per_request import Mask, Seconds
from loadgen.measure.slo import Slo, parse_slo
from loadgen.records import Run, Status

Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees of a run's agents, in order of the schedule.

    Per row of the run: `tree`, the number of its tree (-1: a request of no agent), `chain` in that
    tree, from 1, and `turn`, its place in its chain, from 1; `binding` is the row of its tree that
    it waited for longest (-1: none). `first` is the first row of each tree.
    """

    tree: Rows
    chain: Rows
    turn: Rows
    binding: Rows
    first: Rows

    def __len__(self) -> int:
        return len(self.first)

    def any_of(self, rows: Mask) -> Mask:
        """The trees that have any of the rows."""
        found: Mask = np.bincount(self.tree[rows & (self.tree >= 0)], minlength=len(self)) > 0
        return found

    def begun_s(self, run: Run) -> Seconds:
        """The first release of each tree; NaN where nothing was released."""
        begun_s = np.full(len(self), np.inf)
        own = self.tree >= 0
        released_s = run.request_rows["released_s"][own]
        np.minimum.at(begun_s, self.tree[own], np.where(np.isnan(released_s), np.inf, released_s))
        return np.where(np.isinf(begun_s), np.nan, begun_s)


def trees_of(run: Run) -> Trees | None:
    """The trees of a run; None without agents. A tree begins with the first request of its first
    chain, which waits for nothing or for the tree that a user played before it."""
    schedule = run.schedule_rows
    n, chain = len(schedule), schedule["chain"].astype(np.intp)
    is_agent = chain > 0
    if not is_agent.any():
        return None
    is_first = (chain == 1) & ((schedule["n_parents"] == 0) | schedule["after_failure"])
    order = np.lexsort((np.arange(n), schedule["session_id"]))
    tree = np.full(n, -1)
    tree[order] = np.cumsum(is_first[order]) - 1
    tree[~is_agent] = -1
    numbers = np.empty(int(is_first.sum()), np.intp)
    first = np.flatnonzero(is_first)
    numbers[tree[first]] = np.arange(len(first))  # in order of the schedule
    tree[is_agent] = numbers[tree[is_agent]]
    return Trees(tree, chain, _turns(tree, chain), _binding(run, tree), first)


def _turns(tree: Rows, chain: Rows) -> Rows:
    order = np.lexsort((np.arange(len(tree)), chain, tree))
    is_new = np.r_[True, (np.diff(tree[order]) != 0) | (np.diff(chain[order]) != 0)]
    place = np.arange(len(tree))
    turn = np.zeros(len(tree), np.intp)
    turn[order] = place - np.maximum.accumulate(np.where(is_new, place, 0)) + 1
    return np.where(tree >= 0, turn, 0)


def _binding(run: Run, tree: Rows) -> Rows:
    """Of the rows of its tree that a row waits for, the one whose end and gap were over last."""
    ids, edges = run.schedule_rows["request_id"], run.edge_rows
    edges = edges[np.isin(edges["request_id"], ids) & np.isin(edges["after"], ids)]
    child, parent = (np.searchsorted(ids, edges[name]) for name in ("request_id", "after"))
    inside = (tree[child] >= 0) & (tree[child] == tree[parent])
    child, parent, gap_s = child[inside], parent[inside], edges["delay_s"][inside]
    over_s = run.request_rows["done_s"][parent] + gap_s
    order = np.lexsort((np.nan_to_num(over_s, nan=-np.inf), child))
    binding = np.full(len(tree), -1)
    binding[child[order]] = parent[order]  # the last write wins: that of the latest
    return binding


@dataclass(frozen=True, slots=True)
class TreeTimes:
    """Seconds of each tree that has ended, else NaN. `task_s`: from its first release to its last
    end. The path of requests and gaps that ended last is `model_s` (requests of its first chain) +
    `tools_s` (gaps before these) + `subagents_s` (requests of other chains, and the gaps before
    them) = `task_s`. `waiting_s` are all requests on the path."""

    task_s: Seconds
    model_s: Seconds
    tools_s: Seconds
    subagents_s: Seconds
    waiting_s: Seconds

    @property
    def wait_share(self) -> NDArray[np.float64]:
        """The share of a tree's time in which it waited for answers; NaN where it has not ended."""
        share = np.full(len(self.task_s), np.nan)
        np.divide(self.waiting_s, self.task_s, out=share, where=self.task_s > 0)
        return share


def ended_trees(trees: Trees, run: Run) -> Mask:
    """The trees all of whose requests were successful."""
    return ~trees.any_of(run.request_rows["status"] != Status.ok)


def tree_times(trees: Trees, run: Run, took_s: Seconds | None = None) -> TreeTimes:
    """The times of the trees. `took_s` are the times from release to end of each row by which the
    requests of the recorded path are judged (None: as recorded)."""
    rows = run.request_rows
    released_s, done_s = rows["released_s"], rows["done_s"]
    took_s = done_s - released_s if took_s is None else took_s
    ended, begun_s = ended_trees(trees, run), trees.begun_s(run)
    parts = np.full((4, len(trees)), np.nan)  # model, tools, subagents, waiting
    for number, row in zip(*_last_rows(trees, done_s, ended), strict=True):
        model_s = tools_s = subagents_s = waiting_s = 0.0
        while row >= 0:
            before = int(trees.binding[row])
            since_s = begun_s[number] if before < 0 else done_s[before]
            gap_s, own_s = float(released_s[row] - since_s), float(took_s[row])
            waiting_s += own_s
            if trees.chain[row] == 1:
                model_s, tools_s = model_s + own_s, tools_s + gap_s
            else:
                subagents_s += own_s + gap_s
            row = before
        parts[:, number] = model_s, tools_s, subagents_s, waiting_s
    return TreeTimes(parts[0] + parts[1] + parts[2], *parts)


def _last_rows(trees: Trees, done_s: Seconds, ended: Mask) -> tuple[list[int], list[int]]:
    """The ended trees, and the row of each that ended last."""
    rows = np.flatnonzero(trees.tree >= 0)
    rows = rows[ended[trees.tree[rows]]]
    order = rows[np.lexsort((done_s[rows], trees.tree[rows]))]
    is_last = np.r_[np.diff(trees.tree[order]) != 0, True] if len(order) else np.empty(0, bool)
    last = order[is_last]
    return trees.tree[last].tolist(), last.tolist()


@dataclass(frozen=True, slots=True)
class TreeOutcomes:
    """The trees that began in the measured window (`due`), of which some `met` and some `missed`
    their SLOs. The others had missed nothing, and had not ended when the run did. `kept` are all
    trees that ended without a miss, whenever they began. `hits` are the trees that met or missed,
    in order of their start: whether they met."""

    due: Mask
    met: Mask
    missed: Mask
    kept: Mask
    hits: Mask

    @property
    def n(self) -> int:
        return int(np.count_nonzero(self.due))

    @property
    def n_met(self) -> int:
        return int(np.count_nonzero(self.met))

    @property
    def n_missed(self) -> int:
        return int(np.count_nonzero(self.missed))

    @property
    def n_open(self) -> int:
        return self.n - self.n_met - self.n_missed


def tree_outcomes(
    trees: Trees,
    run: Run,
    due: Mask,
    met: Mask,
    window: MeasuredWindow,
    limits: Sequence[tuple[Slo, Mask]] = (),
    took_s: Seconds | None = None,
) -> TreeOutcomes:
    """How the trees kept their SLOs: the limits of each request (`met` are the due rows that met
    them) and the `limits` of each tree, each with the rows that it applies to.

    A tree is due if its first request is. A due request that did not meet its limits makes it
    missed, and so does a task time that was over before the run ended.
    """
    is_due = due[trees.first]
    missed = trees.any_of(due & ~met)
    ended, times = ended_trees(trees, run), tree_times(trees, run, took_s)
    lasted_s = window.end_s - trees.begun_s(run)  # so far
    for slo, rows in limits:
        values = times.task_s if slo.metric == "task_time_s" else times.wait_share
        is_over = ended & ~(values <= slo.limit)
        if slo.metric == "task_time_s":
            is_over |= ~ended & (lasted_s > slo.limit)
        missed |= is_over & rows[trees.first]
    kept = ended & ~missed
    is_met, is_missed = is_due & kept, is_due & missed
    hits = is_met[in_order_of_start(trees, run, is_met | is_missed)]
    return TreeOutcomes(is_due, is_met, is_missed, kept, hits)


def tree_limits(run: Run) -> list[tuple[Slo, Mask]]:
    """The limits per tree that a run was made under, each with the rows that it applies to."""
    class_id = run.schedule_rows["class_id"]
    everywhere: Mask = np.full(len(class_id), True)
    limits = [(parse_slo(text), everywhere) for text in run.manifest.slo]
    for name, own in slos_by_class(run).items():
        limits += [(slo, class_id == run.names.classes.index(name)) for slo in own]
    return [(slo, rows) for slo, rows in limits if slo.scope == "tree"]


def in_order_of_start(trees: Trees, run: Run, which: Mask) -> Rows:
    """The numbers of some trees in order of their first release, or of its scheduled time."""
    begun_s = trees.begun_s(run)
    planned_s = run.schedule_rows["scheduled_s"][trees.first]
    at_s = np.where(np.isnan(begun_s), planned_s, begun_s)
    numbers = np.flatnonzero(which)
    return numbers[np.argsort(at_s[numbers], kind="stable")]
