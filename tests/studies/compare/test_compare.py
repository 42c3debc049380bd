"""A comparison says better, same, worse or that it cannot tell, and is rarely wrong about it."""

import json
import math

import numpy as np
import pytest
from rig import nights

from loadgen.errors import UsageError
from loadgen.measure.measures import Measured, measure
from loadgen.studies.compare.contrast import Noise, noise_of, runs_needed
from loadgen.studies.compare.judgement import POWER, exit_code, margin_of
from loadgen.studies.compare.numbers import GATED, compare, measure_noise
from tests.runs import measured_run, traffic, with_manifest, with_reasoning, with_shard


def side(first_seed, n=4, **changes):
    return [measured_run(seed=first_seed + k, **changes) for k in range(n)]


def by_measure(comparison):
    return {one.measure: one for one in comparison.measures}


def test_equal_nights_rarely_alarm():
    # 200 nights at 5 %: 10 alarms are expected at most, more than 18 have a probability of 0.5 %.
    rng = np.random.default_rng(41)
    found = [nights.verdicts(nights.runs(rng, 5), nights.runs(rng, 5)) for _ in range(200)]
    assert sum("worse" in night.values() for night in found) <= 18
    assert sum("better" in night.values() for night in found) <= 18


def test_a_5_percent_slow_down_is_found_with_the_runs_the_tool_recommends():
    # 120 nights, each planned from its own 30 equal runs. At 92 % power fewer than 90 % are found
    # with a probability of 15 %; the seed is fixed, benchmarks/compare_power.py has 2000 nights.
    rng = np.random.default_rng(42)
    asked, n_found = [], 0
    for _ in range(120):
        noise = noise_of(np.log(nights.runs(rng, 30)[2]))
        assert noise is not None
        n = runs_needed(noise, math.log(1.05), 2 * 0.05 / len(nights.MEASURES), POWER)
        assert n is not None
        night = nights.verdicts(nights.runs(rng, n), nights.runs(rng, n, slower=1.05))
        n_found += night["mean(tpot)"] == "worse"
        asked.append(n)
    assert n_found >= 108
    assert np.median(asked) <= 1.5 * nights.oracle_runs(1.05)


def test_a_slower_server_is_worse_in_tpot_alone():
    found = compare(side(0), side(10, itl_s=0.0105))
    assert found.verdict == "worse"
    tpot = by_measure(found)["mean(tpot)"]
    assert tpot.low < 0.05 < tpot.high
    assert by_measure(found)["p50(ttft)"].verdict != "worse"
    assert compare(side(10, itl_s=0.0105), side(0), metrics=["mean(tpot)"]).verdict == "better"


def test_ttfat_is_compared_where_answers_have_reasoning():
    sides = [
        [with_reasoning(run, has_answer_after_s=after_s) for run in side(first)]
        for first, after_s in ((0, 0.5), (10, 0.8))
    ]
    found = by_measure(compare(*sides))
    assert found["p50(ttfat)"].verdict == found["p99(ttfat)"].verdict == "worse"
    assert found["p50(ttfat)"].b - found["p50(ttfat)"].a == pytest.approx(0.3, abs=0.02)
    assert found["p50(ttft)"].verdict != "worse"
    assert not found["p50(ttfat)"].is_gated
    assert "p50(ttfat)" not in by_measure(compare(side(0), side(10)))
    one_side = by_measure(compare(side(0), sides[1]))  # a server that begins to reason
    assert one_side["p50(ttfat)"].verdict == "worse"


def drawn(rate_per_s, n_failed=0):
    """Three runs of schedules with this rate, 20 s each; a little noise from the last requests."""
    n = round(22 * rate_per_s)
    return [measured_run(n + k, rate_per_s=rate_per_s, seed=k, n_failed=n_failed) for k in range(3)]


def test_a_goodput_that_follows_the_drawn_schedule_is_not_worse():
    """10.2/s and 9.55/s were offered and served in full: 6 % less, and no worse a server."""
    found = by_measure(compare(drawn(10.2), drawn(9.55)))
    goodput = found["goodput"]
    assert (goodput.a, goodput.b) == pytest.approx((10.2, 9.55), abs=0.1)
    assert (goodput.verdict, found["requests_per_s"].verdict) == ("same", "same")
    failing = by_measure(compare(drawn(10.2), drawn(9.55, n_failed=40)))
    assert failing["goodput"].verdict == "worse"


def test_a_run_compared_with_itself_is_the_same():
    run = measured_run()
    found = compare(run, run, within_run=True)
    assert {one.verdict for one in found.measures if one.is_gated} == {"same"}
    assert all(one.change == 0 for one in found.measures)


def test_one_run_a_side_concludes_nothing_but_with_known_noise():
    a, b = measured_run(seed=1), measured_run(seed=2, itl_s=0.012)
    found = compare(a, b)
    assert found.verdict == "inconclusive"
    assert any("One run a side" in note for note in found.notes)
    known = {"mean(tpot)": Noise(0.01, 9)}
    assert compare(a, b, metrics=["mean(tpot)"], noise=known).verdict == "worse"
    known = {"mean(tpot)": Noise(0.2, 9)}
    assert compare(a, b, metrics=["mean(tpot)"], noise=known).verdict == "inconclusive"


def test_the_noise_is_the_spread_of_equal_runs():
    runs = side(0, 6)
    of_runs = [np.mean(np.sort(Measured(run).columns.tpot_s[20:])) for run in runs]
    found = measure_noise(runs, ["mean(tpot)"])["mean(tpot)"]
    assert found.sd == pytest.approx(np.std(np.log(of_runs), ddof=1))
    assert found.df == 5
    with pytest.raises(UsageError, match="at least three valid runs"):
        measure_noise(runs[:2])


def test_failures_make_the_error_rate_worse():
    found = compare(side(0), side(10, n_failed=30))
    assert by_measure(found)["error_rate"].verdict == "worse"
    assert by_measure(found)["error_rate"].change == pytest.approx(0.15)


def test_no_failure_in_few_requests_does_not_prove_there_are_none():
    few = compare(side(0, 3, n_requests=30), side(9, 3, n_requests=30))
    assert by_measure(few)["error_rate"].verdict == "inconclusive"
    assert by_measure(compare(side(0), side(9)))["error_rate"].verdict == "same"


def test_schedules_shared_by_one_run_of_each_side_are_blocks():
    a = [with_manifest(run, schedule_sha256=f"{k}") for k, run in enumerate(side(0))]
    b = [with_manifest(run, schedule_sha256=f"{k}") for k, run in enumerate(side(9))]
    found = compare(a, b)
    assert found.pairing == "by schedule"
    assert by_measure(found)["p50(ttft)"].df == 3
    assert compare(a, side(9)).pairing == "none"


def test_what_differs_beyond_the_factor_is_refused_by_its_keys():
    run = measured_run()
    sent = {"name": "quickstart", "arrivals": {"rate": "8/s"}}
    faster = with_manifest(run, scenario={"resolved": {**sent, "arrivals": {"rate": "9/s"}}})
    run = with_manifest(run, scenario={"resolved": sent})
    with pytest.raises(UsageError) as caught:
        compare(run, faster)
    assert str(caught.value).splitlines() == [
        "these runs are not comparable:",
        "scenario.arrivals.rate: A has 8/s, B has 9/s",
        "Compare runs that agree in these keys, or allow a difference: --vary KEY (scenario, "
        "target.model, …)",
    ]
    assert compare(run, faster, vary=["scenario.arrivals.rate"])
    other_gpu = with_manifest(run, target={"labels": {"gpu": "h200"}})
    with pytest.raises(UsageError, match=r"target\.labels\.gpu: A has none, B has h200"):
        compare(run, other_gpu)
    assert compare(run, other_gpu, vary=["gpu"])
    with pytest.raises(UsageError, match="no such key"):
        compare(run, run, vary=["gpuu"])


def test_the_changed_configuration_is_told_and_a_mixed_side_refused():
    run = measured_run()
    newer = with_manifest(run, target={"labels": {"gpu": "none", "version": "0.10"}})
    (change,) = compare(run, newer).changes
    assert (change.key, change.a, change.b) == ("target.labels.version", None, "0.10")
    with pytest.raises(UsageError, match=r"within B, target\.labels\.version"):
        compare(run, [run, newer])


def test_seeds_slos_and_names_do_not_make_runs_incomparable():
    run = measured_run(slo=["ttft <= 1s"])
    other = with_manifest(run, seed=9, slo=["ttft <= 2s"], schedule_sha256="cd")
    found = compare(run, other)
    assert found.pairing == "none"
    assert "attainment" not in by_measure(found)
    assert "have different SLOs" in found.notes[0]


def test_runs_that_cannot_be_trusted_are_left_out_and_told():
    late = {"n": 2000, "p50": 0.0, "p99": 0.02, "max": 0.02}
    bad = with_shard(measured_run(seed=3, slo=["p99(ttft) <= 1s"]), loop_lag_s=late)
    assert Measured(bad).summary.verdict == "met", "1 s is far away"
    bad = with_manifest(bad, slo=())
    found = compare([*side(0, 3), bad], side(9, 3))
    assert by_measure(found)["mean(tpot)"].n_runs == (3, 3)
    assert "is left out because the run is invalid: p50 TTFT " in found.notes[0]
    assert "of which up to 20.2 ms may be the load generator's" in found.notes[0]
    assert compare([bad], side(9, 3)).verdict == "invalid"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("verdict", "codes"),
    [
        ("worse", (1, 1)),
        ("inconclusive", (0, 3)),
        ("invalid", (3, 3)),
        ("same", (0, 0)),
        ("better", (0, 0)),
    ],
)
def test_worse_and_invalid_always_fail_and_inconclusive_by_fail_on(verdict, codes):
    assert tuple(exit_code(verdict, on) for on in ("worse", "inconclusive")) == codes


def test_a_wider_margin_makes_the_same_out_of_worse():
    a, b = side(0), side(10, itl_s=0.0105)
    one = compare(a, b, metrics=["mean(tpot)"], margins={"mean(tpot)": 0.08})
    assert one.verdict == "same"
    assert json.loads(json.dumps(one.to_json(), allow_nan=False))["verdict"] == "same"


def test_values_are_those_of_the_summary():
    one = Measured(measured_run(n_failed=7, slo=["ttft <= 110ms"]))
    summary = one.summary
    expected = {
        "p99(ttft)": summary.metrics["ttft_s"].percentiles["p99"].value,
        "mean(tpot)": summary.metrics["tpot_s"].mean,
        "p90(itl)": summary.metrics["itl_s"].percentiles["p90"].value,
        "attainment": summary.attainment.value,
        "goodput": summary.goodput.requests_per_s.value,
        "goodput_output_tokens_per_s": summary.goodput.output_tokens_per_s,
        "requests_per_s": summary.throughput.requests_per_s,
        "error_rate": 7 / 200,
    }
    for text, value in expected.items():
        assert one.value(measure(text)) == pytest.approx(value), text


def test_attainment_is_not_compared_without_a_per_request_limit():
    found = compare(side(0), side(10))
    assert "attainment" not in {one.measure for one in found.measures}
    assert "Attainment is n/a: no per-request limit." in found.notes
    limited = [measured_run(seed=k, slo=["ttft <= 110ms"]) for k in range(6)]
    found = compare(limited[:3], limited[3:])
    assert "attainment" in {one.measure for one in found.measures}
    assert not any("n/a" in note for note in found.notes)
    unlimited = Measured(measured_run())
    assert np.isnan(unlimited.value(measure("attainment")))
    assert np.isnan(unlimited.estimate(measure("attainment"), 0.95).value)


def test_a_closed_loop_is_judged_by_its_throughput_too():
    classes = {"default": traffic(is_closed_loop=True)}
    runs = [with_manifest(r, classes=classes) for r in side(0)]
    gated = {one.measure for one in compare(runs, runs[::-1]).measures if one.is_gated}
    assert gated == {*GATED, "output_tokens_per_s"}


@pytest.mark.parametrize("text", ["ttft", "max(ttft)", "p99(tftt)", "p99(attainment)"])
def test_what_is_no_measure_is_refused_with_one_that_is(text):
    with pytest.raises(UsageError, match="--metric"):
        measure(text)


def queue_run(load, seed, n=1000):
    """A run of a single-server queue (M/M/1) with its response times as TTFT."""
    rng = np.random.default_rng(seed)
    gaps, services = rng.exponential(1 / load, n), rng.exponential(1.0, n)
    run = measured_run(n_requests=n, seed=seed)
    released_s = run.request_rows["released_s"]
    wait, waits = 0.0, []
    for gap, service in zip(gaps, services, strict=True):
        waits.append(wait + service)
        wait = max(0.0, wait + service - gap)
    shift_s = released_s + np.array(waits) - run.request_rows["first_token_s"]
    for name in ("first_chunk_s", "first_token_s", "first_answer_s", "last_token_s", "done_s"):
        run.request_rows[name] += shift_s
    run.chunk_rows["received_s"] += np.repeat(shift_s, 20)
    return with_manifest(run, schedule_sha256=f"{seed}", target={"kind": "sim"})


def test_equal_single_runs_of_a_queue_are_rarely_worse():
    # 60 pairs at 5 %: 3 are expected, more than 7 have a probability of 1 %.
    rows = [
        compare(queue_run(0.7, 2 * k), queue_run(0.7, 2 * k + 1), metrics=["p50(ttft)"])
        for k in range(60)
    ]
    assert sum(found.verdict == "worse" for found in rows) <= 7
    assert sum(found.verdict == "better" for found in rows) <= 4


def test_a_run_shorter_than_the_memory_of_its_queue_is_not_judged():
    a, b = queue_run(0.97, 1, n=300), queue_run(0.97, 2, n=300)
    found = compare(a, b, metrics=["p50(ttft)"])
    assert found.verdict == "inconclusive"
    assert by_measure(found)["p50(ttft)"].low is None
    assert any("Not judged: p50(ttft)" in note for note in found.notes)


def test_requests_of_one_schedule_are_compared_in_pairs_despite_a_queue():
    a = queue_run(0.7, 5)
    b = with_manifest(queue_run(0.7, 5), run="slower")
    for name in ("first_chunk_s", "first_token_s", "first_answer_s", "last_token_s", "done_s"):
        b.request_rows[name] += 0.2
    b.chunk_rows["received_s"] += 0.2
    found = by_measure(compare(a, b, metrics=["p50(ttft)"]))["p50(ttft)"]
    assert found.verdict == "worse"
    assert "paired by request" in found.how


def test_a_rate_that_falls_to_zero_is_worse():
    one = [measured_run(seed=k, slo=["ttft <= 1s"]) for k in range(4)]
    none = [measured_run(seed=9 + k, slo=["ttft <= 1s"], ttft_s=9.0) for k in range(4)]
    several = by_measure(compare(one, none, metrics=["goodput", "attainment"]))
    alone = by_measure(compare(one[0], none[0], within_run=True, metrics=["goodput", "attainment"]))
    for found in (several, alone):
        assert found["goodput"].verdict == "worse"
        assert found["goodput"].change == -1
        assert -1 <= found["goodput"].low <= found["goodput"].high < -0.5
        assert found["attainment"].verdict == "worse"
        assert -1 <= found["attainment"].low <= -0.9
    back = by_measure(compare(none, one, metrics=["goodput"]))["goodput"]
    assert (back.verdict, back.change, back.low) == ("better", math.inf, None)


def test_nothing_but_failures_is_compared_without_a_warning_of_numpy():
    # Warnings are errors in these tests.
    broken = [measured_run(seed=k, n_failed=220) for k in range(6)]
    found = compare(broken[:3], side(20, 3))
    assert by_measure(found)["error_rate"].verdict == "better"
    assert compare(broken[0], broken[1], within_run=True).verdict == "inconclusive"
    assert compare(broken[0], side(3, 1)[0], within_run=True).verdict == "inconclusive"


def test_equal_runs_are_the_same_within_a_margin_that_the_noise_allows():
    found = by_measure(compare(side(0, 6), side(20, 6)))
    tpot = found["mean(tpot)"]
    assert tpot.verdict == "same"
    assert tpot.margin == pytest.approx(max(0.01, tpot.smallest_same))
    assert tpot.margin < 0.05
    assert tpot.is_decidable
    assert tpot.effect == 0.05
    assert compare(side(0, 6), side(20, 6), margins={"": 0.03}).measures[0].margin == 0.03


@pytest.mark.parametrize(
    ("text", "useful"),
    [
        ("mean(tpot)", 0.05),
        ("p50(ttft)", 0.1),
        ("p99(itl)", 0.1),
        ("attainment", 0.02),
        ("error_rate", 0.01),
    ],
)
def test_the_useful_margins(text, useful):
    assert margin_of(measure(text), {}) == useful


def test_a_measure_that_is_too_noisy_does_not_hold_back_the_same():
    noisy = [measured_run(seed=k, ttft_s=0.1 * (1 + k % 3)) for k in range(10)]
    found = compare(noisy[:5], noisy[5:])
    ttft = by_measure(found)["p99(ttft)"]
    assert (ttft.verdict, ttft.is_set_aside, ttft.is_decidable) == ("inconclusive", True, False)
    assert found.verdict == "same"
    (note,) = (note for note in found.notes if note.startswith("Not decidable"))
    assert f"needs {ttft.runs_needed} runs a side" in note
    # 22 s of traffic a run, on both sides
    assert ttft.minutes_needed == pytest.approx(ttft.runs_needed * 2 * 22 / 60)
    by_name = compare(noisy[:5], noisy[5:], metrics=["p99(ttft)", "mean(tpot)"])
    assert by_name.verdict == "inconclusive"


def test_an_error_rate_alone_makes_no_same():
    noisy = [
        measured_run(seed=k, ttft_s=0.1 * (1 + k % 3), itl_s=0.01 * (1 + k % 2)) for k in range(8)
    ]
    found = compare(noisy[:4], noisy[4:])
    assert by_measure(found)["error_rate"].verdict == "same"
    assert by_measure(found)["mean(tpot)"].is_set_aside
    assert found.verdict == "inconclusive"


def test_a_noisy_measure_that_is_surely_worse_is_worse():
    a = [measured_run(seed=k, ttft_s=0.1 * (1 + k % 2)) for k in range(6)]
    b = [measured_run(seed=20 + k, ttft_s=1.0 * (1 + k % 2)) for k in range(6)]
    found = compare(a, b)
    assert by_measure(found)["p99(ttft)"].is_set_aside
    assert found.verdict == "worse"


def test_a_disturbed_run_of_eight_changes_little():
    a, b = side(0, 8), side(20, 8)
    disturbed = [measured_run(seed=99, itl_s=0.014), *b[1:]]
    clean, beside = (
        by_measure(compare(a, runs, metrics=["mean(tpot)"]))["mean(tpot)"]
        for runs in (b, disturbed)
    )
    assert beside.verdict == "same"
    assert beside.change == pytest.approx(clean.change, abs=0.003)
    assert beside.noise < 2 * clean.noise
