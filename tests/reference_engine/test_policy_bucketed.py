"""Buckets of prompt length: splitting, order of service, and the cost of padding."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.policies.length_buckets import Buckets
from reference_engine.state.cost_model import Padding
from reference_engine.state.plan import Cause, Why
from tests.reference_engine.engine_kit import Rig, request, rig
from tests.reference_engine.policy_kit import Arrival, play, traffic


def bucketed(n_blocks: int = 256, max_num_seqs: int = 64, **knobs: Any) -> Rig:
    return rig(
        n_blocks, 1023, max_num_seqs, policy="bucketed", executor_args={"step_s": 0.01}, **knobs
    )


def prompts(*lengths: int, max_tokens: int = 4, arrived_s: float = 0.0) -> list[Any]:
    """Requests p{k}-{length}, with prompts that share nothing."""
    return [
        request(f"p{k}-{n}", [(k * 31 + i) % 256 for i in range(n)], max_tokens,
                arrived_s=arrived_s)
        for k, n in enumerate(lengths)
    ]  # fmt: skip


def planned(engine: Rig) -> dict[str, int]:
    return {item.request_id: item.n_tokens for item in engine.plan.items}


# --- the buckets themselves


def ranges(buckets: Buckets) -> list[str]:
    return [bucket.name for bucket in buckets.all]


def test_buckets_split_at_the_middle_and_merge_when_the_load_falls():
    buckets = Buckets(longest=1023, split_above=2, split_share=0.5)
    reqs = prompts(10, 20, 900)
    for req in reqs[:2]:
        buckets.put(req, 9.0)
    buckets.adjust()
    assert ranges(buckets) == ["0-1024"]  # split_above is 2
    buckets.put(reqs[2], 9.0)
    new = buckets.adjust()
    assert ranges(buckets) == ["0-512", "512-1024"] == [bucket.name for bucket in new]
    assert [len(bucket) for bucket in buckets.all] == [2, 1]
    buckets.put(prompts(1, 2, 3, 30)[3], 9.0)
    buckets.adjust()
    assert ranges(buckets) == ["0-32", "32-64", "64-128", "128-256", "256-512", "512-1024"]
    for req in reqs:
        buckets.drop(req.id)
    buckets.adjust([700])  # one waits and one is in prefill: two are active
    assert len(buckets.all) == 6
    buckets.adjust()
    assert ranges(buckets) == ["0-1024"]


def test_a_prompt_that_is_being_read_counts_for_the_split():
    """One short prompt waits while a document is read: half of the two are short."""
    buckets = Buckets(longest=1023, split_above=1, split_share=0.5)
    buckets.put(prompts(10)[0], 9.0)
    buckets.adjust([900])
    assert ranges(buckets) == ["0-512", "512-1024"]


def test_a_lone_short_prompt_does_not_wait_behind_a_document():
    """The document takes 8 steps of 100 tokens. The short prompt arrives during the first and is
    read in the second, next to 90 tokens of the document."""
    engine = bucketed(token_budget=100, max_bucket_wait="1h")
    engine.admit(request("document", [1] * 800, 1))
    engine.step()
    engine.admit(request("short", [2] * 10, 1, arrived_s=0.005))
    assert planned(engine) == {"short": 10, "document": 90}
    engine.step()
    account = engine.state.explain("short")
    assert account is not None
    assert account.ttft_s == pytest.approx(0.015)
    engine.drain()


def test_a_bucket_of_mostly_long_prompts_does_not_split():
    buckets = Buckets(longest=1023, split_above=1, split_share=0.5)
    for req in prompts(10, 900, 950):
        buckets.put(req, 9.0)
    buckets.adjust()
    assert ranges(buckets) == ["0-1024"]


@given(
    lengths=st.lists(st.integers(1, 1200), max_size=30),
    split_above=st.integers(1, 5),
    split_share=st.floats(0.1, 1.0),
    leaving=st.sets(st.integers(0, 29)),
)
def test_each_request_is_in_the_bucket_of_its_length(lengths, split_above, split_share, leaving):
    """Also prompts longer than the range, which belong to its end."""
    buckets = Buckets(1023, split_above, split_share)
    reqs = prompts(*lengths)
    for req in reqs:
        buckets.put(req, 9.0)
        buckets.adjust()
    for k in leaving & set(range(len(reqs))):
        buckets.drop(reqs[k].id)
    buckets.adjust()
    lows = [bucket.low for bucket in buckets.all]
    highs = [bucket.high for bucket in buckets.all]
    assert lows[0] == 0
    assert highs == [*lows[1:], 1024]  # no gap, no overlap
    held = {req.id: bucket for bucket in buckets.all for _, req in bucket.queue.entries()}
    assert held.keys() == {req.id for k, req in enumerate(reqs) if k not in leaving}
    for name, bucket in held.items():
        n_tokens = int(name.split("-")[1])
        assert bucket.low <= min(n_tokens, 1023) < bucket.high


# --- the mode


@settings(max_examples=20)
@given(
    coming=traffic,
    token_budget=st.integers(4, 64),
    max_num_seqs=st.integers(1, 6),
    pad=st.sampled_from(["none", "batch_max"]),
    order=st.sampled_from(["short_first", "oldest_first"]),
    min_batch=st.integers(1, 3),
    split_above=st.integers(1, 4),
)
def test_budgets_hold_with_padding_counted(
    coming, token_budget, max_num_seqs, pad, order, min_batch, split_above
):
    for moment in play(
        "bucketed", coming, n_blocks=14, max_num_seqs=max_num_seqs, token_budget=token_budget,
        pad=pad, order=order, min_batch=min_batch, split_above=split_above,
        max_bucket_wait="300ms",
    ):  # fmt: skip
        assert moment.n_tokens + moment.plan.padding.prefill_tokens <= token_budget
        assert moment.n_running + len(moment.admitted) <= max_num_seqs
        lengths = [item.n_tokens for item in moment.plan.items]
        padding = len(lengths) * max(lengths, default=0) - sum(lengths)
        assert moment.plan.padding == Padding(padding if pad == "batch_max" else 0)
        if min_batch == 1:
            assert moment.admitted or moment.n_running


@settings(max_examples=20)
@given(coming=traffic, wait_ms=st.integers(10, 200), pad=st.sampled_from(["none", "batch_max"]))
def test_no_later_arrival_overtakes_an_overdue_request(coming, wait_ms, pad):
    coming = [Arrival(arrival.at_s, arrival.n_prompt, arrival.n_output) for arrival in coming]
    for moment in play(
        "bucketed", coming, n_blocks=12, max_num_seqs=2, token_budget=48, pad=pad,
        max_bucket_wait=f"{wait_ms}ms",
    ):  # fmt: skip
        late_s = moment.now_s - wait_ms / 1e3 - 1e-9
        overdue = {req.id for req in moment.waiting if req.arrived_s < late_s}
        planned = moment.planned
        if not (overdue and planned):
            continue
        assert planned[0] in overdue, "a request was planned before an overdue one"
        if pad == "none" and not set(planned) <= overdue:  # padded: one bucket a step
            assert overdue <= set(planned), "an overdue request was left out for another"


@settings(max_examples=5)
@given(coming=traffic)
def test_the_same_traffic_gives_the_same_plans(coming):
    first, second = play("bucketed", coming), play("bucketed", coming)
    assert [moment.plan for moment in first] == [moment.plan for moment in second]


def test_short_prompts_overtake_a_long_prompt_in_prefill():
    engine = bucketed(token_budget=64)
    engine.admit(*prompts(900))
    engine.step()
    assert engine.state.view().is_running("p0-900")
    engine.admit(*prompts(900, 20, 30)[1:])
    assert planned(engine) == {"p1-20": 20, "p2-30": 30, "p0-900": 14}


def test_within_a_bucket_it_is_first_come_first_served():
    engine = bucketed(token_budget=100, split_above=9)
    engine.admit(*prompts(90, 20, 30))
    assert planned(engine) == {"p0-90": 90, "p1-20": 10}


def test_oldest_first_serves_the_whole_bucket_of_the_oldest():
    engine = bucketed(token_budget=1000, order="oldest_first", max_bucket_wait="1h")
    engine.clock.advance(9.0)
    for k, (n, arrived_s) in enumerate([(300, 1.0), (20, 2.0), (310, 3.0), (25, 4.0)]):
        engine.admit(prompts(*[n] * (k + 1), arrived_s=arrived_s)[k])
    assert list(planned(engine)) == ["p0-300", "p2-310", "p1-20", "p3-25"]


def test_after_max_bucket_wait_a_long_prompt_goes_first():
    engine = bucketed(token_budget=64, max_bucket_wait="2s")
    engine.admit(*prompts(900, 20, 30))
    engine.clock.advance(1.9)
    assert list(planned(engine)) == ["p1-20", "p2-30", "p0-900"]
    engine.clock.advance(0.2)
    engine.admit(prompts(1, 1, 1, 10, arrived_s=2.1)[3])
    assert planned(engine) == {"p0-900": 64}


def test_a_padded_step_prefills_one_bucket_with_rows_of_equal_length():
    engine = bucketed(token_budget=100, pad="batch_max")
    engine.admit(*prompts(20, 30, 25, 28, 600, 500))
    assert planned(engine) == {"p0-20": 20, "p1-30": 30, "p2-25": 25}  # 4 × 30 would not fit
    assert engine.plan.padding == Padding(prefill_tokens=10 + 5)


def test_buckets_save_padding():
    """Alternating short and long prompts: in one bucket short rows are padded to long rows, in
    buckets of similar length almost nothing is padded."""
    padding = {}
    for split_above in (1, 10_000):
        engine = bucketed(token_budget=512, pad="batch_max", split_above=split_above,
                          order="oldest_first")  # fmt: skip
        engine.admit(*prompts(*[40, 200] * 10, max_tokens=1))
        engine.drain()
        padding[split_above] = engine.state.counters.padding_tokens
    assert padding == {1: 0, 10_000: 10 * 160}


def test_a_bucket_waits_until_it_is_full_or_its_oldest_request_is_overdue():
    engine = bucketed(min_batch=2, max_bucket_wait="1s", split_share=0.1)
    engine.admit(*prompts(20, 900, 950))
    assert list(planned(engine)) == ["p1-900", "p2-950"]
    cause = Cause(Why.bucket_not_ready)
    assert engine.plan.segments == (("0-512", cause),)
    detail = engine.plan.segments[0][1]
    assert (detail.have, detail.want, detail.until_s) == (1, 2, 1.0)
    engine.step()
    engine.clock.advance(1.0 - engine.clock.now_s())
    engine.drain()
    waits = dict(engine.state.accounting.accounts.get("p0-20").waits)  # type: ignore[union-attr]
    assert waits[cause] == pytest.approx(1.0)


def test_an_engine_with_only_an_unready_bucket_waits():
    engine = bucketed(min_batch=2, max_bucket_wait="1s")
    engine.admit(*prompts(20))
    assert (engine.plan.items, engine.plan.wait_until_s) == ((), 1.0)
    engine.state.is_source_closed = True  # no more requests will arrive
    assert planned(engine) == {"p0-20": 20}
