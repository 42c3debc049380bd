"""Waiting time by cause, against a ledger that writes every second down."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.accounting.ledger import Ledger
from reference_engine.state.plan import Cause, Why

BUDGET, SLOT = Cause(Why.no_token_budget), Cause(Why.no_seq_slot)
CAUSES = [BUDGET, SLOT, *(Cause(Why.behind, f"r{i}") for i in range(3))]


def test_an_interval_is_charged_to_the_cause_given_at_its_beginning():
    ledger = Ledger()
    ledger.enter("a", 1.0)
    ledger.set_causes(1.5, [("a", Cause(Why.no_kv_blocks))], [], BUDGET)
    ledger.set_causes(3.5, [], [], SLOT)
    ledger.set_causes(4.0, [], [], BUDGET)
    ledger.leave("a", 4.25)
    assert ledger.pop("a") == {
        Cause(Why.step_in_flight): 0.5,
        Cause(Why.no_kv_blocks): 2.0,
        SLOT: 0.5,
        BUDGET: 0.25,
    }


def test_waits_of_a_live_request_include_the_open_interval():
    ledger = Ledger()
    ledger.enter("a", 0.0)
    ledger.set_causes(1.0, [], [], BUDGET)
    assert ledger.waits("a", 3.0) == {Cause(Why.step_in_flight): 1.0, BUDGET: 2.0}
    assert ledger.cause("a") == BUDGET


def test_causes_are_charged_together_whatever_their_details():
    ledger = Ledger()
    ledger.enter("a", 0.0)
    ledger.set_causes(0.0, [], [], Cause(Why.window_open, until_s=3.0))
    ledger.set_causes(1.0, [], [], Cause(Why.window_open, until_s=4.0, have=1, want=8))
    assert ledger.waits("a", 2.0) == {Cause(Why.window_open): 2.0}
    current = ledger.cause("a")
    assert current is not None
    assert (current.until_s, current.have, current.want) == (4.0, 1, 8)


def test_requests_wait_for_the_cause_of_their_segment():
    ledger = Ledger()
    for name in ("short", "long", "moved"):
        ledger.enter(name, 0.0)
    ledger.assign("long", "16k", 0.0)
    ledger.set_causes(0.0, [], [("16k", SLOT)], BUDGET)
    ledger.assign("moved", "16k", 1.0)
    assert ledger.counts() == (("no_token_budget", 1), ("no_seq_slot", 2))
    ledger.set_causes(2.0, [], [], BUDGET)
    assert ledger.waits("short", 4.0) == {BUDGET: 4.0}
    assert ledger.waits("long", 4.0) == {SLOT: 2.0, BUDGET: 2.0}
    assert ledger.waits("moved", 4.0) == {BUDGET: 3.0, SLOT: 1.0}


class Scribe:
    """The same bookkeeping with one loop over everybody per interval."""

    def __init__(self):
        self.cause, self.segment, self.now_s = {}, defaultdict(str), 0.0
        self.charged: dict[str, dict[Cause, float]] = defaultdict(lambda: defaultdict(float))
        self.rest, self.own = Cause(Why.step_in_flight), {}

    def advance(self, now_s):
        for name, own in self.cause.items():
            cause = own or self.own.get(self.segment[name], self.rest)
            self.charged[name][cause] += now_s - self.now_s
        self.now_s = now_s

    def plan(self, causes, segments, rest):
        self.rest, self.own = rest, dict(segments)
        for name in self.cause:
            self.cause[name] = dict(causes).get(name)


names = st.sampled_from([f"n{i}" for i in range(6)])
segments = st.sampled_from(["", "x", "y"])
cause = st.sampled_from(CAUSES)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), names, cause),
        st.tuples(st.just("leave"), names, cause),
        st.tuples(st.just("assign"), names, segments),
        st.tuples(
            st.just("plan"),
            st.dictionaries(names, cause, max_size=2),
            st.tuples(st.dictionaries(segments.filter(bool), cause), cause),
        ),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(steps=steps, gaps=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.5]), min_size=60, max_size=60))
def test_every_second_is_charged_as_by_a_ledger_that_loops(steps, gaps):
    ledger, scribe = Ledger(), Scribe()
    now_s = 0.0
    for (what, subject, detail), gap_s in zip(steps, gaps, strict=False):
        now_s += gap_s
        scribe.advance(now_s)
        if what == "enter" and subject not in scribe.cause:
            ledger.enter(subject, now_s, detail)
            scribe.cause[subject] = detail
        elif what == "leave" and subject in scribe.cause:
            ledger.leave(subject, now_s)
            del scribe.cause[subject]
        elif what == "assign" and subject in scribe.charged:
            ledger.assign(subject, detail, now_s)
            scribe.segment[subject] = detail
        elif what == "plan":
            ledger.set_causes(now_s, subject.items(), detail[0].items(), detail[1])
            scribe.plan(subject, detail[0], detail[1])
        scribe.charged.update({name: scribe.charged[name] for name in scribe.cause})
        for name in scribe.cause:
            expected = {why: s for why, s in scribe.charged[name].items() if s}
            assert ledger.waits(name, now_s) == expected
    assert sum(n for _, n in ledger.counts()) == len(scribe.cause)


def test_a_long_memory_is_shortened_without_losing_anything():
    ledger = Ledger()
    ledger.enter("old", 0.0)
    for i in range(5000):
        ledger.set_causes(float(i), [], [], CAUSES[i % len(CAUSES)])
        ledger.enter(f"n{i}", float(i))
        ledger.set_causes(i + 0.25, [], [], BUDGET)
        ledger.leave(f"n{i}", i + 0.5)
        ledger.pop(f"n{i}")
        if i == 4000:
            assert sum(ledger.waits("old", 4000.5).values()) == 4000.5
            ledger.leave("old", 4000.5)
    waits = ledger.pop("old")
    assert sum(waits.values()) == 4000.5
    assert waits[SLOT] == pytest.approx(800 * 0.25)
    assert len(ledger._timelines[""]._spans) <= len(CAUSES) + 1
