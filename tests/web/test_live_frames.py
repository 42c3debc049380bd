"""Frames and the live status: exact merging, and a ledger that adds up to the schedule."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.drive.live_sample import FIELDS
from loadgen.live.early_warning import EarlyWarning
from loadgen.live.live_histogram import LiveCounts
from loadgen.manifest.sections import InstrumentLimits
from loadgen.measure.slo import parse_slo
from loadgen.records import SCHEDULE, Status
from loadgen.web.control_messages import Frame, encode, read_up
from loadgen.web.live_frames import FrameBuilder, LiveStatus, ledger, merged
from loadgen.web.run_protocol import RemoteShard

NOBODY = (0,) * len(Status)
STATES = ["running", "lost", "died", "done"]
durations = st.lists(st.floats(1e-6, 100.0), max_size=30)
counts = st.lists(st.integers(0, 50), min_size=len(Status), max_size=len(Status))


def frame_of(shard, ttft_s=(), by_status=NOBODY):
    one = LiveCounts()
    one.add(ttft_s)
    histograms = {"ttft": one.encode()}
    return Frame("r", shard, 1, 2.0, 0, 0, 0, 0, list(by_status), 0, histograms, {})


@given(st.lists(durations, min_size=1, max_size=4))
def test_merged_histograms_are_those_of_one_process(per_shard):
    together = LiveCounts()
    for values in per_shard:
        together.add(values)
    frames = [frame_of(k, values) for k, values in enumerate(per_shard)]
    assert merged(frames)["ttft"].encode() == together.encode()


@given(durations, durations)
def test_a_difference_of_histograms_holds_the_later_values(before, later):
    old, new = LiveCounts(), LiveCounts()
    old.add(before)
    new.add([*before, *later])
    assert new.more_than(old).n == len(later)
    assert new.more_than(old).seconds() == pytest.approx(sorted(later), rel=2e-3, abs=1e-6)


@given(
    st.lists(
        st.tuples(counts, st.integers(0, 100), st.sampled_from(STATES)),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_the_ledger_sums_to_the_schedule_at_every_instant(parts, is_over):
    shards, n = [], 0
    for number, (by_status, left, state) in enumerate(parts):
        n += sum(by_status) + left
        told = frame_of(number, by_status=by_status)
        shards.append(RemoteShard(number, f"w{number}", sum(by_status) + left, state, frame=told))
    found = ledger(shards, [one for shard in shards if (one := shard.frame)], is_over)
    assert sum(found.values()) == n
    lost = sum(left for _, left, state in parts if is_over or state in ("lost", "died"))
    assert found["lost"] == lost + sum(by_status[Status.lost] for by_status, _, _ in parts)


def ended(class_id=0, status=Status.ok, n_events=8, **seconds):
    """An entry of a live sample; fields that are not given are None."""
    known = {"class_id": class_id, "status": int(status), "n_events": n_events, **seconds}
    return [known.get(field) for field in FIELDS]


OK_S = {"lateness_s": 0.001, "tpot_s": 0.01, "max_stall_s": 0.02}


OPEN_LOOP: dict[str, Any] = {"requested_per_s": 1.0, "is_closed_loop": False}


def beat(*ended, **changes):
    said = {
        "now_s": 1.0, "heard_s": 1.0, "released": 2, "sent": 2, "in_flight": 0, "waiting": 0,
        "by_status": [2, *[0] * (len(Status) - 1)], "withdrawn": 0, "measured": 2, "gaps": [],
    }  # fmt: skip
    return {**said, "ended": list(ended), **changes}


def test_frames_count_goodput_by_class_and_slo():
    builder = FrameBuilder("r", 0, {"chat": ["ttft <= 100ms"], "code": []})
    quick = ended(ttft_s=0.05, e2e_s=0.5, **OK_S)
    slow = ended(ttft_s=0.20, e2e_s=0.9, **OK_S)
    failed = ended(1, Status.timeout, 0, lateness_s=0.001, duration_s=9.0)
    told = builder.take(beat(quick, slow, failed))
    assert [(one.class_name, one.status) for one in told] == [
        ("chat", Status.ok), ("chat", Status.ok), ("code", Status.timeout),
    ]  # fmt: skip
    frame = builder.frame()
    assert (frame.classes["chat"].slo_met, frame.classes["chat"].events) == (1, 16)
    assert frame.classes["code"].by_status[Status.timeout] == 1
    e2e = merged([frame])["e2e"]
    assert e2e.n == 2
    assert e2e.quantile(1.0) == pytest.approx(0.9, rel=1e-3)
    assert builder.frame().seq == 2


def test_the_attainment_so_far_is_that_of_its_slo_and_leaves_requests_in_flight_out():
    schedule = np.zeros(10, SCHEDULE)
    schedule["scheduled_s"] = np.arange(10)
    builder = FrameBuilder("r", 0, {"default": ["ttft <= 100ms"]})
    answers = (ended(ttft_s=ttft_s, e2e_s=0.5, **OK_S) for ttft_s in (0.05, 0.2))
    builder.take(beat(*answers, now_s=3.5, sent=4, in_flight=2))
    slos = {"": [parse_slo("ttft <= 100ms"), parse_slo("attainment >= 95%")]}
    facts = LiveStatus(schedule, 10.0, has_limits=True, slos=slos, **OPEN_LOOP).snapshot(
        [RemoteShard(0, "w", 10, "running", frame=builder.frame())]
    )
    assert facts["due"] == 4
    assert facts["attainment"] == 0.5
    (share,) = (row["shown"] for row in facts["slos"] if row["metric"] == "attainment")
    assert share == "50 %"
    assert facts["ledger"]["open"] == 8
    assert facts["point"]["ttft"]["p50"] == pytest.approx(0.05, rel=1e-3)


def test_without_a_per_request_limit_there_is_no_attainment_so_far():
    schedule = np.zeros(10, SCHEDULE)
    schedule["scheduled_s"] = np.arange(10)
    builder = FrameBuilder("r", 0, {"default": []})
    builder.take(beat(ended(ttft_s=0.05, e2e_s=0.5, **OK_S), now_s=3.5))
    shards = [RemoteShard(0, "w", 10, "running", frame=builder.frame())]
    facts = LiveStatus(schedule, 10.0, has_limits=False, **OPEN_LOOP).snapshot(shards)
    assert (facts["has_limits"], facts["attainment"]) == (False, None)


def test_a_closed_loop_offers_no_rate():
    schedule = np.zeros(10, SCHEDULE)
    live: dict[str, Any] = {"has_limits": True, "requested_per_s": None}
    closed = LiveStatus(schedule, 10.0, **live, is_closed_loop=True).snapshot([])
    assert (closed["requested_per_s"], closed["asked_per_s"]) == (None, None)
    known = LiveStatus(schedule, 10.0, has_limits=True, **OPEN_LOOP).snapshot([])
    assert (known["requested_per_s"], known["asked_per_s"]) == (1.0, 1.0)


def test_a_run_of_a_number_of_requests_has_that_number_and_no_offered_rate():
    live = LiveStatus(np.zeros(10, SCHEDULE), 600.0, True, None, is_closed_loop=False, n_measured=7)
    facts = live.snapshot([])
    assert (facts["n_measured"], facts["asked_per_s"]) == (7, None)
    timed = LiveStatus(np.zeros(10, SCHEDULE), 10.0, has_limits=True, **OPEN_LOOP).snapshot([])
    assert timed["n_measured"] is None


def test_two_close_frames_make_one_point_and_the_next_holds_both():
    """Frames of several shards arrive in turn: the counts of a single frame are no rate."""
    live, builder = (
        LiveStatus(np.zeros(10, SCHEDULE), 10.0, has_limits=True, **OPEN_LOOP),
        FrameBuilder("r", 0, {"default": []}),
    )
    points = []
    for now_s, n_ok in ((1.0, 2), (1.02, 6), (2.0, 8)):
        by_status = [n_ok, *[0] * (len(Status) - 1)]
        builder.take(beat(now_s=now_s, by_status=by_status))
        points.append(
            live.snapshot([RemoteShard(0, "w", 10, "running", frame=builder.frame())])["point"]
        )
    assert points[1] is None
    assert (points[0]["ok_per_s"], points[2]["ok_per_s"]) == (2.0, 6.0)


def test_requests_that_were_cancelled_or_never_sent_have_not_failed():
    builder = FrameBuilder("r", 0, {"default": []})
    by_status = [0] * len(Status)
    by_status[Status.ok], by_status[Status.cancelled], by_status[Status.timeout] = 3, 4, 2
    by_status[Status.not_released], by_status[Status.dropped] = 5, 1
    builder.take(beat(by_status=by_status, withdrawn=3))
    shard = RemoteShard(0, "w", 15, "running", frame=builder.frame())
    live = LiveStatus(np.zeros(15, SCHEDULE), 10.0, has_limits=True, **OPEN_LOOP).snapshot([shard])
    assert (live["sums"]["ok"], live["sums"]["failed"]) == (3, 2)  # the two timeouts
    assert live["shards"][0]["failed"] == 8  # with those that were never sent


def test_requests_of_a_lost_shard_are_not_in_flight():
    builder = FrameBuilder("r", 0, {"default": []})
    builder.take(beat(in_flight=4))
    shard = RemoteShard(0, "w", 10, "running", frame=builder.frame())
    live = LiveStatus(np.zeros(10, SCHEDULE), 10.0, has_limits=True, **OPEN_LOOP)
    assert live.snapshot([shard])["sums"]["in_flight"] == 4
    shard.state = "lost"
    assert live.snapshot([shard])["sums"]["in_flight"] == 0


def facts_with_slos(*, by_class, slos, use=()):
    """Of a run with two quick requests, a slow request, and a failed request of the last class."""
    builder = FrameBuilder("r", 0, by_class)
    last = len(by_class) - 1
    requests = [ended(ttft_s=ttft_s, e2e_s=0.5, **OK_S) for ttft_s in (0.05, 0.06, 0.2)]
    by_status = [3, *[0] * (len(Status) - 1)]
    by_status[Status.timeout] = 1
    failed = ended(last, Status.timeout, 0, lateness_s=0.001, duration_s=9.0)
    builder.take(beat(*requests, failed, now_s=4.0, by_status=by_status, use=list(use)))
    live = LiveStatus(
        np.zeros(10, SCHEDULE), 10.0, has_limits=True, **OPEN_LOOP,
        slos={name: [parse_slo(text) for text in texts] for name, texts in slos.items()},
        warning=EarlyWarning(InstrumentLimits(None, 5e-3, 2.5e-3, 0.9, 0.01), 5e-3, 10.0),
    )  # fmt: skip
    frame = read_up(encode(builder.frame()))
    assert isinstance(frame, Frame)
    return live.snapshot([RemoteShard(0, "w", 10, "running", frame=frame)])


def test_the_page_has_each_slo_with_its_value_so_far():
    texts = ["ttft <= 100ms", "p50(ttft) <= 100ms", "error_rate <= 10%"]
    facts = facts_with_slos(by_class={"default": texts[:1]}, slos={"": texts})
    rows = [(slo["text"], slo["shown"], slo["is_met"]) for slo in facts["slos"]]
    assert rows == [
        ("ttft <= 100ms", "p99 ∞", False),
        ("p50(ttft) <= 100ms", "p50 60 ms", True),
        ("error_rate <= 10%", "25 %", False),
        ("attainment >= 99%", "50 %", False),
    ]
    assert facts["slos"][0]["value"] is None
    json.dumps(facts, allow_nan=False)


def test_a_class_among_several_has_its_attainment_and_no_percentile():
    own = ["ttft <= 100ms"]
    facts = facts_with_slos(by_class={"chat": own, "code": []}, slos={"": [], "chat": own})
    rows = [(slo["class"], slo["shown"], slo["is_met"]) for slo in facts["slos"]]
    assert rows == [("chat", "p99 –", None), ("chat", "66.7 %", False)]


def test_the_page_warns_of_a_worker_without_time_on_its_core():
    one_class: dict[str, Any] = {"by_class": {"default": []}, "slos": {"": []}}
    facts = facts_with_slos(**one_class, use=[8.0, 0.2, 0.3, None])
    assert "waiting for a core 30 % of the time (limit 1 %)" in facts["warning"]
    assert facts_with_slos(**one_class)["warning"] is None
