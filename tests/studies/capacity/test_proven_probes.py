"""Capacities against proven probes, and what a run hands to the estimate from its schedule."""

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from rig import queues
from rig.queues import Queue

from loadgen.manifest.self_report import ClientReport
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import due_rows, measured_window
from loadgen.records import Phase
from loadgen.run.execute import execute
from loadgen.run.run_options import RunOptions
from loadgen.studies.capacity import next_probe as planning
from loadgen.studies.capacity.by_schedule import Estimate
from loadgen.studies.capacity.curve import throughput
from loadgen.studies.capacity.next_probe import (
    NextProbe,
    Question,
    SearchState,
    _at_estimate,
    _by_schedule,
    _consistent,
    _given,
    _in_order,
    _pays,
    _proven,
    fit_into,
    judge,
    next_probe,
)
from loadgen.studies.capacity.observed import probe_of, sent_of
from loadgen.studies.capacity.probe import Probe
from loadgen.studies.capacity.result import conclude
from loadgen.studies.capacity.spec import CapacitySpec, question_of
from loadgen.studies.capacity.view import attainment_interval, lines, next_steps
from loadgen.workload.scenario import load_scenario
from tests.runs import SHARD, measured_run

ROOT = Path(__file__).parents[3]


def probe(level, share, bounds=(None, None), n=1600):
    due = (n // 16,) * 16
    met = (round(share * n / 16),) * 16
    low, high = bounds
    return Probe(level, due, met, 1e6, n / level, n / level, low=low, high=high)


def ends(state):
    """(low, value, high) of a state that has a value."""
    assert state.value is not None, state.why
    return state.low, state.value, state.high


PLANNED = NextProbe(5.0, 1.0, 8.0)
NEAR = [probe(9.0, 0.95), probe(9.5, 0.93), probe(10.0, 0.9), probe(10.5, 0.86), probe(11.0, 0.8)]


def given(probes, low, value, high):
    """The state of an estimate with this interval, beside these probes."""
    question = Question(0.9, 4.0)
    posterior = judge(question, NEAR).posterior
    state = SearchState("found", posterior, value, low, high, "schedule")
    return _consistent(question, [*NEAR, *probes], [state])


def test_an_estimate_below_a_load_that_is_proven_to_pass_is_never_printed():
    proven = probe(12.0, 0.97, (0.94, 0.99))
    state = given([proven], 9.5, 10.0, 10.5)
    assert (state.outcome, state.value, state.low, state.high) == ("contradictory", None, 10, 12)
    assert state.why == "the estimate is 10, and a probe at 12 is proven to meet the SLO"
    assert ends(given([proven], 9.5, 11.0, 13.0))[1] > 12.0
    assert ends(judge(Question(0.9, 4.0), [*NEAR, proven]))[1] >= 12.0


def test_an_estimate_above_a_load_that_is_proven_to_miss_is_never_printed():
    fails = probe(8.0, 0.8, (0.75, 0.85))
    state = given([fails], 9.5, 10.0, 10.5)
    assert state.outcome == "contradictory"
    assert state.why == "the estimate is 10, and a probe at 8 is proven to miss the SLO"
    assert ends(given([fails], 7.0, 9.0, 10.5))[1] < 8.0


def test_a_search_that_the_load_generator_ends_states_the_cause():
    busy = replace(probe(16.0, 1.0), grade="untrusted", why="the load generator waited 40 %")
    answer = conclude(Question(0.9, 4.0), [probe(4.0, 1.0), busy], "req/s")
    assert answer.sentence() == "at least 4 req/s; the load generator could not send more"
    assert lines(answer)[-1] == "at 16 req/s: the load generator waited 40 %"
    alone = conclude(Question(0.9, 4.0), [busy], "req/s")
    assert alone.sentence() == "unknown; the load generator was the limit"


def test_contradictory_probes_end_with_exit_code_3_and_both_loads():
    passes, fails = probe(9.0, 0.97, (0.94, 0.99)), probe(8.0, 0.8, (0.7, 0.85))
    answer = conclude(Question(0.9, 4.0), [*NEAR, passes, fails], "req/s")
    assert (answer.outcome, answer.exit_code, answer.value) == ("contradictory", 3, None)
    assert answer.sentence() == (
        "contradictory probes: a probe at 9 is proven to meet the SLO, and a probe at 8 is proven "
        "to miss it (in req/s)"
    )
    assert "a probe was lucky" in next_steps(answer)[0]


def test_a_probe_that_contradicts_the_others_is_repeated_twice_at_most():
    passes, fails = probe(9.0, 0.97, (0.94, 0.99), n=3200), probe(8.0, 0.8, (0.7, 0.85), n=1600)
    probes = [*NEAR, passes, fails]
    repeat = next_probe(Question(0.9, 4.0), probes)
    assert repeat is not None
    assert repeat.level == 9.0
    assert repeat.measure_s == pytest.approx(1.25 * 3200 / 9.0)
    assert next_probe(Question(0.9, 4.0), [*probes, passes, passes]) is None


@pytest.mark.parametrize(("n", "outcome"), [(3200, "unsettled"), (3184, "contradictory")])
def test_a_repeat_that_is_as_long_and_misses_withdraws_the_proof(n, outcome):
    passes, fails = probe(11.5, 0.97, (0.94, 0.99), n=3200), probe(10.8, 0.8, (0.7, 0.85), n=160)
    state = judge(Question(0.9, 4.0), [*NEAR, passes, fails, probe(11.5, 0.8, n=n)])
    assert state.outcome == outcome


def test_no_bound_lies_beyond_a_load_that_is_proven_to_miss():
    free, bounded = (
        judge(Question(0.9, 4.0), [*NEAR[:3], probe(10.2, 0.88, bounds)])
        for bounds in ((None, None), (0.8, 0.89))
    )
    _, value, high = ends(free)
    assert high > 10.2 > value
    assert ends(bounded)[1:] == (value, 10.2)


def test_the_estimate_is_the_median_of_what_a_proof_leaves_open():
    """ln(capacity) normal, ± 20 % at 95 %, given that it is at least the median: its 75th
    percentile, 0.6745 standard deviations above."""
    sd = math.log(1.2) / 1.959964
    found = _given(10 / 1.2, 10.0, 12.0, 10.0 + 1e-9, math.inf, 0.95)
    assert found == pytest.approx(10 * math.exp(0.6745 * sd), rel=1e-4)
    assert _given(8.0, 10.0, 12.0, 9.0, 11.0, 0.95) == 10.0
    assert 8.0 < _given(8.0, 10.0, 12.0, 0.0, 9.0, 0.95) < 9.0
    assert 11.0 < _given(2.0, 10.0, 12.0, 11.0, math.inf, 0.95) < 12.0  # not beyond its bound


def test_a_probe_between_two_bursts_proves_no_more_than_the_rate_it_sent():
    """The probe at 12 sent 9.5 per second, and the one at 8 sent 10.6 in a burst."""
    lull = replace(probe(12.0, 0.97, (0.94, 0.99), n=1600), measured_s=1600 / 9.5)
    burst = replace(probe(8.0, 0.8, (0.75, 0.85), n=1600), measured_s=1600 / 10.6)
    rates = Question(0.9, 4.0, law=Queue().law)
    assert _proven(rates, [lull, burst]) == pytest.approx((9.5, 10.6, 12.0))
    assert _proven(Question(0.9, 4.0), [lull, burst])[:2] == (12.0, 8.0)


def state_of(value, reach, outcome="unsettled", method="schedule"):
    return SearchState(outcome, None, value, value * (1 - reach), value * (1 + reach), method)


@pytest.mark.parametrize(
    ("schedule", "curve", "first", "why"),
    [
        ((0.39, "unsettled"), (0.1, "unsettled"), "schedule", ""),
        ((0.41, "unsettled"), (0.5, "unsettled"), "schedule", ""),
        ((0.41, "unsettled"), (0.3, "unsettled"), "curve", "the schedule leaves a wider interval"),
        ((0.1, "unsettled"), (0.04, "found"), "curve", ""),
        ((0.1, "found"), (0.04, "found"), "schedule", ""),
    ],
)
def test_the_schedule_answers_unless_the_curve_is_better(schedule, curve, first, why):
    by_schedule, by_curve = state_of(10.0, *schedule), state_of(11.0, curve[0], curve[1], "curve")
    question, posterior = Question(0.9, 4.0), judge(Question(0.9, 4.0), NEAR).posterior
    states = [replace(one, posterior=posterior) for one in _in_order(by_schedule, by_curve)]
    answer = _consistent(question, NEAR, states)
    assert (answer.method, answer.why) == (first, why)


@pytest.mark.parametrize(("narrowed", "pays"), [(0.94, True), (0.95, False)])
def test_narrowing_stops_when_two_of_ten_probes_narrow_by_less_than_a_quarter_power(narrowed, pays):
    """The last two took a fifth of the time: 0.8 ** 0.25 = 0.946."""
    probes = [replace(one, spent_s=10.0) for one in (*NEAR, *NEAR)]
    question = Question(0.9, 4.0)
    before = judge(question, probes[:8])
    _, value, _ = ends(before)
    reach = narrowed * before.half_width * value
    state = SearchState("unsettled", None, value, value - reach, value + reach, "schedule")
    assert before.half_width < 0.25
    assert _pays(question, probes, state) == pays
    assert _pays(question, probes[3:], state)  # too few probes
    assert _pays(question, probes, replace(state, method="curve"))
    assert _pays(question, probes, replace(state, low=value / 2, high=2 * value))


@pytest.mark.parametrize(
    ("target", "sizes", "outcome"),
    [
        (0.9, (736, 752), "unsettled"),
        (0.9, (752, 752), "found"),
        (0.9, (1600,), "unsettled"),
        (0.99, (1488, 1504), "unsettled"),
        (0.99, (1504, 1504), "found"),
    ],
)
def test_a_narrow_interval_ends_a_search_from_1500_requests_and_30_misses_on(
    target, sizes, outcome, monkeypatch
):
    """The probe at 13, more than 25 % above the estimate, does not count."""
    monkeypatch.setattr(planning, "estimated", lambda *_: Estimate(10.0, 9.0, 11.1, 0.05))
    question, posterior = Question(target, 4.0, 0.15), judge(Question(0.9, 4.0), NEAR).posterior
    probes = [*(probe(10.2, 0.9, n=n) for n in sizes), probe(13.0, 0.5, n=1600)]
    assert posterior is not None
    assert _by_schedule(question, probes, posterior).outcome == outcome


@pytest.mark.parametrize(("value", "level"), [(11.5, 11.5), (15.0, 13.75)])
def test_a_probe_at_the_estimate_lies_up_to_a_quarter_above_all_earlier_loads(value, level):
    """A lucky miss at 11 is not the highest load that the search tries."""
    state = replace(given([], 9.0, 10.0, 11.0), value=value)
    planned = _at_estimate(Question(0.9, 4.0, law=Queue().law), NEAR[::-1], state)
    assert planned.level == pytest.approx(level)


@pytest.mark.parametrize(("law", "first_s"), [(Queue().law, 24.5), (None, 45.0)])
def test_the_first_probe_of_a_schedule_takes_an_eighth_of_the_time_or_a_tenth_of_its_window(
    law, first_s
):
    """At 99 % and 2 per second 400 requests would take 200 of 180 s: a tenth, after 4.5 s."""
    question = Question(0.99, 2.0, warmup_s=2.0, law=law)
    planned = next_probe(question, [])
    assert planned is not None
    fitting = fit_into(question, [], planned, 180.0)
    assert fitting is not None
    assert fitting.warmup_s + fitting.measure_s == pytest.approx(first_s)


@pytest.fixture(scope="module")
def mm4():
    """A search of 3 000 requests' time on M/M/4, whose capacity is known."""
    queue = Queue(servers=4, service=1, limit_s=1.0)
    truth = queue.capacity(0.9)
    question = Question(0.9, 0.4 * truth, warmup_s=2, measure_s=5, law=queue.law)
    budget_s = 3000 / truth
    return truth, question, queues.search(queue, question, np.random.default_rng(5), budget_s)


def test_a_search_with_a_budget_gives_the_capacity_by_its_schedule(mm4):
    truth, _, (state, probes) = mm4
    assert state.method == "schedule"
    low, value, high = ends(state)
    assert low < truth < high
    assert state.half_width < 0.25
    assert sum(one.spent_s for one in probes) <= 3000 / truth * (1 + 1e-9)
    assert abs(probes[-1].level / value - 1) < 0.2  # the last probe lies near the answer


def test_probes_that_are_stored_give_the_same_answer(mm4):
    _, question, (state, probes) = mm4
    stored = msgspec.json.decode(msgspec.json.encode(probes), type=list[Probe])
    assert stored == probes
    again = judge(question, stored)
    assert (again.value, again.low, again.high) == (state.value, state.low, state.high)


def test_without_a_law_the_curve_answers_and_the_reason_is_stated(mm4):
    _, question, (_, probes) = mm4
    plain = replace(question, law=None, no_law="the rate varies by design")
    answer = conclude(plain, probes, "req/s")
    assert answer.method == "curve"
    assert lines(answer)[-1].endswith("of each load alone: the rate varies by design")
    assert "alone" not in lines(conclude(question, probes, "req/s"))[-1]


def test_the_interval_of_a_probe_is_that_of_its_own_requests():
    own, short = probe(9.0, 0.95, (0.5, 0.99)), probe(9.0, 0.95)
    interval = attainment_interval(own)
    assert (interval.low, interval.high) == (0.5, 0.99)
    for open_ended in (short, replace(own, grade="saturated")):
        interval = attainment_interval(open_ended)
        assert (interval.value, interval.low, interval.high) == (0.95, None, None)


@pytest.mark.parametrize(
    ("name", "over", "why"),
    [
        ("capacity_search", "rate", ""),
        ("closed_loop_users", "concurrency", "the send times of users follow from the answers"),
        ("diurnal_day", "rate", "the rate varies by design"),
        ("agent_multi_turn", "rate", "requests wait for the answers of others"),
    ],
)
def test_a_schedule_that_follows_from_answers_gives_no_law(name, over, why):
    words = ["slo=['ttft <= 500ms']"]
    question = question_of(CapacitySpec(load_scenario(name, words), "sim", over=over))
    assert question.no_law == why
    assert (question.law is None) == bool(why)


def test_the_law_is_the_scenario_at_another_load():
    question = question_of(CapacitySpec(load_scenario("capacity_search"), "sim"))
    assert question.law is not None
    traffic = question.law(20.0, 8000)
    assert len(traffic) / traffic.at_s[-1] == pytest.approx(20.0, rel=0.05)
    assert np.median(traffic.input_tokens) == pytest.approx(220, rel=0.05)
    assert np.all(np.diff(traffic.at_s) >= 0)
    assert question.law(20.0, 8000) is traffic


def test_the_rows_of_a_run_are_stored_with_their_misses():
    run = measured_run(slo=["ttft <= 1s"])
    met = np.arange(len(run.schedule_rows)) != 3
    sent = sent_of(run, met, measured_window(run).end_s)
    assert sent is not None
    assert sent.at_us[:3] == (0, 100_000, 200_000)
    assert sum(sent.missed) == sent.missed[3] == 1
    schedule = run.schedule_rows.copy()
    schedule["prefix_id"], schedule["prefix_tokens"] = 1, schedule["input_tokens"] - 5
    shared = sent_of(replace(run, schedule_rows=schedule), met, 2.0)
    assert shared is not None
    assert set(shared.new_tokens) == {5}
    assert len(shared.at_us) == 20
    schedule["n_parents"][7] = 1
    assert sent_of(replace(run, schedule_rows=schedule), met, 2.0) is None


@pytest.fixture(scope="module")
def finished(tmp_path_factory, page_cache):
    """A run of 8 s at 5 requests per second."""
    scenario = load_scenario(
        "capacity_search", ["phases.warmup=1s", "phases.measure=8s", "requests.output_tokens=8"]
    )
    out_dir = tmp_path_factory.mktemp("finished") / "r"
    options = RunOptions(engine="shape=8b", out_dir=out_dir, cache_dir=page_cache)
    return execute(scenario, "sim", options, Console(quiet=True))


@pytest.mark.parametrize(("n_due", "bounds"), [(99, (None, None)), (100, (0.95, 1.0))])
def test_a_probe_of_fewer_than_100_requests_proves_nothing(finished, n_due, bounds):
    run = measured_run(slo=["ttft <= 1s"])
    due = np.flatnonzero(due_rows(run))
    schedule = run.schedule_rows.copy()
    schedule["phase"][due[n_due:]] = Phase.warmup
    run = replace(run, schedule_rows=schedule)
    summary = summarize(run)
    share = replace(summary.attainment, low=0.95, high=1.0)
    summary = replace(summary, attainment=share)
    seen = probe_of(
        replace(finished, run=run, summary=summary), PLANNED, "measured", 9.0, 0.9, "01"
    )
    assert (seen.n_due, (seen.low, seen.high)) == (n_due, bounds)


def test_a_client_that_waited_for_a_core_is_not_trusted(finished):
    shard = msgspec.structs.replace(SHARD, run_delay_share=0.4)
    run = replace(finished.run, instrument=ClientReport(shards=(shard,)))
    seen = probe_of(replace(finished, run=run), PLANNED, "measured", 9.0, 0.9, "01")
    assert seen.grade == "untrusted"
    assert seen.why.startswith("the load generator waited 40 % of the probe for a CPU core")
    assert probe_of(finished, PLANNED, "measured", 9.0, 0.9, "01").is_usable


def test_a_short_probe_between_two_bursts_leaves_the_throughput_as_it_is():
    """48 requests of a load of 16/s came in 10 s and met the SLO: 4.8/s, no more than is served."""
    overload = replace(probe(64.0, 0.0, n=640), served_per_s=10.0)
    lull = replace(probe(16.0, 1.0, n=48), measured_s=10.0)
    for probes in ([overload], [overload, lull]):
        found = throughput(probes, 0.9)
        assert found is not None
        assert found.log_rate == pytest.approx(math.log(10.0))
    assert throughput([overload, replace(lull, measured_s=3.0)], 0.9) is None


def test_a_probe_at_the_estimate_may_lie_below_a_quarter_of_an_overload(mm4):
    """A short probe between two bursts looks fine at 3.5 times the capacity, and the overload that
    follows lies four times higher."""
    truth, question, (_, probes) = mm4
    high = replace(probes[0], level=14 * truth, met=(0,) * 16, grade="saturated", sent=None)
    planned = next_probe(question, [*probes, high])
    assert planned is not None
    assert planned.level < 1.5 * truth < 14 * truth / 4


TITLES = {
    "M/M/1": "mm1",
    "G/G/4": "gg4",
    "M/D/2": "md2",
    "M/G/3, pauses of 1.5 s each 45 s": "mg3-pauses",
    "M/M/12": "mm12",
    "MMPP/M/6, bursts": "mmpp6",
    "batching engine": "batching",
    "two classes, 4 servers": "two-classes",
    "rate limit of 20/s, refusals as misses": "rate-limited",
    "processor sharing": "ps",
}


def test_the_printed_coverage_of_searches_is_the_measured_one():
    """Each row of the decision is a queue of benchmarks/results/capacity_of_3000.json, and the page
    states the least and the greatest coverage."""
    servers = json.loads((ROOT / "benchmarks/results/capacity_of_3000.json").read_text())["servers"]
    printed = {}
    for line in (ROOT / "docs/decisions/0064-capacity-by-schedule.md").read_text().splitlines():
        fields = [field.strip() for field in line.strip().strip("|").split("|")]
        if fields[0] in TITLES:
            printed[TITLES[fields[0]]] = fields[1:]
    shown = {
        name: [
            f"{found['covered']} of {found['searches']}",
            f"{found['capacity_below_the_interval']}",
            f"{100 * found['median_half_width']:.0f} %",
            f"{100 * found['median_absolute_error']:.1f} %",
            f"{100 * found['rms_error']:.1f} %",
            f"{100 * found['bias']:+.1f} %".replace("-", "−"),
            f"{found['by_schedule']}",
        ]
        for name, found in servers.items()
    }
    assert len(printed) >= 4
    assert printed == shown
    shares = [100 * found["covered"] / found["searches"] for found in servers.values()]
    claim = f"on {len(shares)} queues of known capacity, it does in {min(shares):.0f} to"
    page = (ROOT / "docs/capacity.md").read_text()
    assert f"{claim} {max(shares):.0f} (" in page
    strict = json.loads((ROOT / "benchmarks/results/capacity_of_3000_at_99.json").read_text())
    first, second = (
        100 * found["covered"] / found["searches"] for found in strict["servers"].values()
    )
    assert f"at 99 % on two of them in {first:.0f} and {second:.0f}." in page
