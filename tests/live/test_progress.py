"""The live view of a run, on a terminal and in lines."""

import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadgen.drive.instrument import ThreadMeter
from loadgen.drive.live_sample import EndedSample
from loadgen.live.early_warning import EarlyWarning
from loadgen.live.live_histogram import LiveCounts
from loadgen.live.progress import Progress, sparkline
from loadgen.live.run_figures import RunFigures
from loadgen.live.slo_so_far import Tally, slos_so_far
from loadgen.live.watched import meets_slos
from loadgen.manifest.sections import InstrumentLimits
from loadgen.manifest.self_report import ThreadUse
from loadgen.measure.slo import parse_slo
from loadgen.records import Status
from loadgen.workload.scenario import load_scenario, scenario_from_flags

LIMITS = InstrumentLimits(None, 5e-3, 2.5e-3, 0.9, 0.01)
CLASSES = """# Two classes.
name: two
classes:
  chat:
    weight: 3
    requests: {input_tokens: 64, output_tokens: 32}
    slo: ["p99(ttft) <= 500ms"]
  code:
    weight: 1
    requests: {input_tokens: 128, output_tokens: 64}
    slo: ["ttft <= 20ms"]
arrivals: {kind: poisson, rate: 20/s}
phases: {warmup: 2s, measure: 48s}
slo: ["error_rate <= 10%"]
"""


def beat(now_s, **counts):
    by_status = [0] * len(Status)
    by_status[Status.ok], by_status[Status.timeout] = counts["ok"], counts["timeout"]
    by_status[Status.cancelled] = counts.get("cancelled", 0)
    return {
        "now_s": now_s, "released": counts["ok"] + counts["timeout"], "sent": 0, "in_flight": 3,
        "waiting": 0, "by_status": by_status, "ttft_s": [0.1] * 10, "lateness_s": [0.0001],
        "e2e_s": [], "withdrawn": counts.get("withdrawn", 0), "measured": 0,
    }  # fmt: skip


def test_the_live_view_sums_shards_and_prints_lines_without_a_terminal():
    out = io.StringIO()
    with Progress(Console(file=out, width=200), 100, 60.0, is_closed_loop=False) as progress:
        progress.begin()
        progress.beat(0, beat(4.0, ok=8, timeout=0))
        totals = progress.beat(1, beat(6.0, ok=6, timeout=2))
        progress.note("ending the run: because")
    assert (totals.released, totals.in_flight, totals.n_failed, totals.n_ended) == (16, 6, 2, 16)
    first, line, note = out.getvalue().splitlines()
    assert first == "sending 100 requests in 60 s"
    assert line.startswith("6/60 s · sent 16/100 (2.7/s, offered 1.7/s) · in flight 6")
    assert "failed 2" in line
    assert "TTFT p50 100 ms" in line
    assert note == "ending the run: because"


def test_the_live_view_of_a_closed_loop_shows_no_planned_rate():
    out = io.StringIO()
    with Progress(Console(file=out, width=200), 100, 60.0, is_closed_loop=True) as progress:
        progress.begin()
        progress.beat(0, beat(6.0, ok=12, timeout=0))
    first, line = out.getvalue().splitlines()
    assert first == "sending up to 100 requests in 60 s"
    assert line.startswith("6/60 s · sent 12 (2.0/s) · in flight 3")


def test_the_live_view_shows_a_silence_until_a_byte_comes():
    lines, screen = io.StringIO(), io.StringIO()
    for out, is_terminal in ((lines, False), (screen, True)):
        console = Console(file=out, width=200, force_terminal=is_terminal)
        with Progress(console, 100, 60.0, is_closed_loop=False) as progress:
            progress.quiet(3.4)
            progress.beat(0, beat(6.0, ok=6, timeout=2))
            progress.quiet(0.0)
            progress.beat(0, beat(12.0, ok=6, timeout=2))
    quiet, loud = lines.getvalue().splitlines()
    assert "in flight 3, NO BYTE for 3 s" in quiet
    assert "NO BYTE" not in loud
    assert "! no byte from the server for 3 s, 3 requests in flight" in screen.getvalue()


def test_the_last_byte_is_that_of_any_shard_and_unknown_where_a_shard_does_not_state_it():
    with Progress(Console(file=io.StringIO()), 100, 60.0, is_closed_loop=False) as progress:
        progress.beat(0, {**beat(6.0, ok=6, timeout=2), "heard_s": 5.5})
        assert progress.beat(1, {**beat(6.0, ok=6, timeout=2), "heard_s": 4.0}).heard_s == 5.5
        assert progress.beat(1, beat(6.0, ok=6, timeout=2)).heard_s is None


def test_what_was_cancelled_on_purpose_or_at_the_drain_has_not_failed():
    out = io.StringIO()
    with Progress(Console(file=out, width=200), 100, 60.0, is_closed_loop=False) as progress:
        totals = progress.beat(0, beat(6.0, ok=6, timeout=2, cancelled=7, withdrawn=3))
    assert (totals.n_ended, totals.n_failed, totals.n_unfinished) == (15, 2, 4)
    assert "failed 2, unfinished 4, cancelled on purpose 3" in out.getvalue()


def test_the_live_view_draws_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with Progress(console, 100, 60.0, is_closed_loop=False) as progress:
        progress.beat(0, beat(30.0, ok=50, timeout=0))
    assert "sent 50/100" in out.getvalue()


def counts_of(seconds):
    counts = LiveCounts()
    counts.add(seconds)
    return counts


def so_far(text, **tally):
    """The first SLO of a text, for 100 requests of which 2 failed unless stated otherwise."""
    latencies = {"ttft_s": counts_of(np.arange(1, 99) / 100.0)}
    known = {"n_ok": 98, "n_failed": 2, "latencies": latencies, **tally}
    return slos_so_far([parse_slo(text)], Tally(**known))[0]


def test_failed_requests_are_infinitely_slow_in_a_percentile():
    assert so_far("p50(ttft) <= 1s").value == pytest.approx(0.5, rel=1e-3)
    assert so_far("p98(ttft) <= 1s").value == pytest.approx(0.98, rel=1e-3)
    worst = so_far("p99(ttft) <= 1s")
    assert (worst.value, worst.is_met, worst.shown) == (math.inf, False, "p99 ∞")
    assert so_far("max(ttft) <= 1s", n_failed=0).value == pytest.approx(0.98, rel=1e-3)
    assert so_far("mean(ttft) <= 1s").value == pytest.approx(0.495, rel=1e-3)


def test_a_mean_is_not_met_so_far_by_the_requests_that_are_left():
    assert so_far("mean(ttft) <= 1s", n_ok=98, n_failed=2).is_met is None
    assert so_far("mean(ttft) <= 1s", n_ok=99, n_failed=1).is_met is True
    assert so_far("mean(ttft) <= 100ms").is_met is False


def test_a_limit_per_request_shows_the_percentile_that_the_attainment_requires():
    slos = [parse_slo("ttft <= 900ms"), parse_slo("attainment >= 90%")]
    tally = Tally(n_ok=98, n_failed=2, n_met=88, latencies={"ttft_s": counts_of([0.8] * 98)})
    limit, share = slos_so_far(slos, tally)
    assert (limit.shown, limit.is_met) == ("p90 800 ms", True)
    assert (share.value, share.is_met) == (0.88, False)
    assert share.share_of_limit == pytest.approx(0.88 / 0.9)
    implied = slos_so_far([parse_slo("ttft <= 900ms")], tally)[1]
    assert (implied.text, implied.is_met) == ("attainment >= 99%", False)


def test_an_answer_too_short_for_a_tpot_meets_its_limit():
    tally = Tally(n_ok=100, latencies={"tpot_s": counts_of([0.01, 0.02, 0.09])})
    assert slos_so_far([parse_slo("tpot <= 50ms")], tally)[0].value == pytest.approx(0.02, rel=1e-3)


def test_rates_count_from_the_end_of_the_warm_up():
    assert so_far("goodput >= 8/s", n_met=50, measured_s=5.0).value == 10.0
    assert so_far("output_tokens_per_s >= 8/s", n_events=400, measured_s=5.0).value == 80.0
    assert so_far("requests_per_s >= 8/s", measured_s=0.0).value is None
    assert so_far("input_tokens_per_s >= 8/s", measured_s=5.0).is_met is None
    assert so_far("error_rate <= 1%").value == 0.02


def ended(class_id=0, status=Status.ok, ttft_s=0.1, reasoning_s=0.0):
    if status is not Status.ok:
        return EndedSample(class_id, int(status), lateness_s=0.0)
    ttfat_s = None if reasoning_s is None else ttft_s + reasoning_s
    return EndedSample(class_id, 0, ttft_s, 0.0, 0.01, 0.5, 0.5, n_events=41, ttfat_s=ttfat_s)


def two_classes(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(CLASSES)
    return load_scenario(path)


def test_figures_count_slos_after_the_warm_up_and_classes_from_the_start(tmp_path):
    figures = RunFigures(two_classes(tmp_path))
    figures.take(1.0, [ended(1, ttft_s=5.0)])  # in the warm-up
    figures.take(12.0, [ended(), ended(), ended(1), ended(1, ttft_s=0.01)])
    figures.take(12.5, [ended(1, Status.timeout), ended(1, Status.cancelled)])
    values = {(slo.class_name, slo.text): slo.value for slo in figures.slos()}
    assert values["", "error_rate <= 10%"] == 0.2
    assert values["chat", "p99(ttft) <= 500ms"] == pytest.approx(0.1, rel=1e-3)
    assert values["code", "ttft <= 20ms"] == math.inf
    assert values["code", "attainment >= 99%"] == pytest.approx(1 / 3)
    assert [(tally.n_ok, tally.n_failed) for tally in figures.by_class] == [(2, 0), (3, 1)]
    assert figures.over_time["ttft_s"][:2] == [5.0, pytest.approx(math.nan, nan_ok=True)]


SAMPLES = st.builds(
    EndedSample,
    class_id=st.integers(0, 1),
    status=st.sampled_from([0, int(Status.timeout)]),
    ttft_s=st.none() | st.floats(0.01, 2.0),
    ttfat_s=st.none() | st.floats(0.01, 2.0),
    lateness_s=st.floats(0.0, 0.5),
    tpot_s=st.none() | st.floats(0.001, 0.1),
    e2e_s=st.floats(0.1, 9.0),
    close_s=st.floats(0.1, 9.0),
    max_stall_s=st.none() | st.floats(0.001, 0.1),
    n_events=st.integers(0, 100),
    own_slo_s=st.none() | st.tuples(*[st.floats(0.0, 1.0)] * 3),
)
LIMITED = ("ttft <= 1s", "ttft_from_send <= 900ms", "tpot <= 50ms", "max_itl <= 50ms",
           "e2e_per_token <= 100ms", "ttfat <= 1.5s")  # fmt: skip


@given(st.lists(SAMPLES, max_size=12), st.lists(st.sampled_from(LIMITED), unique=True))
def test_requests_counted_together_meet_the_slos_that_each_meets(samples, texts):
    scenario = scenario_from_flags(input_len=8, output_len=8, duration="60s", rate="2/s", slo=texts)
    slos = [parse_slo(text) for text in texts]
    figures = RunFigures(scenario)
    alone = [sample._replace(class_id=0) for sample in samples]
    figures.take(30.0, alone)
    expected = sum(
        sample.status == 0 and sample.e2e_s is not None and meets_slos(sample._asdict(), slos)
        for sample in alone
    )
    assert figures.by_class[0].n_met == expected


def test_tokens_per_second_are_those_of_the_last_five_seconds(tmp_path):
    figures = RunFigures(two_classes(tmp_path))
    for second in range(1, 21):
        figures.take(float(second), [ended()] * (1 if second <= 14 else 3))
    assert figures.tokens_per_s == pytest.approx(3 * 41)


def test_the_dashboard_shows_slos_latencies_rates_failures_and_classes(tmp_path):
    scenario = two_classes(tmp_path)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150, color_system=None)
    figures = RunFigures(scenario)
    warning = EarlyWarning(LIMITS, 5e-3, 48.0)
    with Progress(console, 1000, 50.0, False, None, figures, warning) as progress:
        requests = [*[ended()] * 30, *[ended(1)] * 10, ended(1, Status.timeout)]
        progress.beat(0, {**beat(20.0, ok=40, timeout=1), "ended": requests})
    text = out.getvalue()
    for expected in (
        "20/50 s, 30 s left",
        "✓ error_rate <= 10%                 2.44 %  ≤ 10 %",
        "✓ chat: p99(ttft) <= 500ms      p99 100 ms  ≤ 500 ms   ████░░░░░░░░░░░░░░░░ 20 % of the",
        "✗ code: ttft <= 20ms                 p99 ∞  ≤ 20 ms    ████████████████████  MISSED",
        "TTFT  p50 100 ms, p99 100 ms",
        "TPOT  p50 10 ms, p99 10 ms",
        "rate requested 20/s, achieved 2.05/s · 82 tokens/s · in flight 3",
        "sent 41 of 1\u202f000 · 40 ok · 1 failed (1 timeout)",
        "chat     30       0    100 %    100 ms     10 ms",
        "code     10       1      0 %    100 ms     10 ms",
    ):
        assert expected in text, text
    assert "INVALID" not in text
    assert "TTFAT" not in text


def test_ttfat_stands_beside_ttft_where_answers_begin_with_reasoning(tmp_path):
    requests = [ended(reasoning_s=0.3), ended(1), ended(1, reasoning_s=None)]
    texts = []
    for has_terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=has_terminal, width=150, color_system=None)
        figures = RunFigures(two_classes(tmp_path))
        with Progress(console, 1000, 50.0, False, None, figures) as progress:
            progress.beat(0, {**beat(20.0, ok=3, timeout=0), "ended": requests})
        texts.append(out.getvalue())
    view, line = texts
    assert "TTFAT p50 100 ms, p99 400 ms" in view
    assert "met SLO  TTFT p99  TTFAT p99  TPOT p99" in view
    assert "chat      1       0    100 %    100 ms     400 ms     10 ms" in view
    assert "code      2       0      0 %    100 ms     100 ms     10 ms" in view
    assert "TTFT p50 100 ms, p99 100 ms" in line
    assert "TTFAT p50 100 ms, p99 400 ms · TPOT p50 10 ms" in line


def test_without_a_terminal_a_line_has_the_slos_and_the_warning_comes_once():
    scenario = scenario_from_flags(
        input_len=8, output_len=8, duration="60s", rate="2/s", slo=["p99(ttft) <= 50ms"]
    )
    out = io.StringIO()
    warning = EarlyWarning(LIMITS, scenario.lateness_limit_s, 60.0)
    figures = RunFigures(scenario)
    with Progress(Console(file=out, width=200), 120, 60.0, False, None, figures, warning) as view:
        for second in range(1, 31):
            late = {"lateness_s": [0.02] * 4, "use": (second, 0.97, 0.0, None)}
            view.beat(0, {**beat(float(second), ok=second, timeout=0), **late, "ended": [ended()]})
    lines = out.getvalue().splitlines()
    assert (
        "TPOT p50 10 ms, p99 10 ms · 41 tokens/s · p99(ttft) <= 50ms p99 100 ms MISSED" in lines[0]
    )
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: the run may become INVALID: requests leave late, p99 20 ms (limit 5 ms); a "
        "worker used 97 % of a core, so its own CPU was full: use more workers (--workers), or "
        "lower the rate"
    ]


def use(window_s=10.0, cpu=0.1, delay=0.0, throttled=0.0):
    return ThreadUse(window_s, cpu, delay, throttled, None, None)


@pytest.mark.parametrize(
    ("late_s", "of_worker", "expected"),
    [
        ([1e-4] * 99, use(), None),
        ([0.02] * 19, use(), None),  # too few to judge
        ([0.02] * 99, use(delay=0.07), "p99 20 ms (limit 5 ms); other programs used the machine"),
        (
            [3.5] * 6 + [1e-4] * 94,
            use(cpu=0.6),
            "leave over 3 s late, so the server gets less load",
        ),
        ([], use(cpu=0.95), "busy on its core 95 % of the time (limit 90 %)"),
        ([], use(window_s=1.0, cpu=0.95), None),  # too early to judge
        (
            [],
            use(delay=0.02),
            "waiting for a core 2 % of the time (limit 1 %): stop the other programs",
        ),
        ([], use(throttled=0.4), "throttled by its quota 40 % of the time (limit 1 %)"),
    ],
)
def test_a_run_on_its_way_to_invalid_is_announced_with_its_cause(late_s, of_worker, expected):
    text = EarlyWarning(LIMITS, 5e-3, 60.0).text(counts_of(late_s), [of_worker])
    assert text is None if expected is None else expected in (text or "")


def test_requests_that_wait_for_a_slot_are_no_delay_of_the_load_generator():
    assert EarlyWarning(LIMITS, 5e-3, 60.0).text(None, [use()]) is None


def test_a_sparkline_begins_at_zero_and_leaves_a_gap_for_a_step_without_requests():
    assert sparkline([1.0, math.nan, 0.5, 0.0]) == "█ ▅▁"
    assert sparkline([]) == sparkline([math.nan]) == ""


def test_a_worker_reads_its_use_of_the_core_while_it_works():
    meter = ThreadMeter()
    meter.start()
    total = sum(k * k for k in range(300_000))
    window_s, cpu_share, delay_share, _ = meter.so_far()
    assert total > 0
    assert 0 < window_s < 60
    assert 0 < cpu_share <= 1.01
    assert delay_share is None or delay_share >= 0
